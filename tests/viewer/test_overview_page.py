"""Overview tab: verdicts, comparison of runs, and the step that all tabs share."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from viewer.page_helpers import FIRST, SECOND, OpenPage, serving, until, write_first_and_second
from viewer.run_shapes import SHAPES, write_shape

from benchmarks.synthetic_run import line, write_run

pytestmark = pytest.mark.asyncio(loop_scope="session")
BOTH = f"runs={FIRST},{SECOND}"
SUPERVISED, DULL = "20260104-000000-supervised", "20260105-000000-dull"
ANSWERS = {0: (0.0, 0.25, 0.75), 10: (0.25, 0.5, 1.0), 20: (0.0, 0.75, 1.0)}
"""Rewards of the siblings of a held-out prompt by step. Answers with reward 0 could not be parsed."""


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of runs for these tests only, because they check the complete list of runs."""
    folder = tmp_path_factory.mktemp("overview") / "runs"
    write_first_and_second(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def viewer_url(runs_folder: Path) -> AsyncGenerator[str]:
    async with serving(runs_folder) as url:
        yield url


@pytest.fixture
def supervised(runs_folder: Path) -> Iterator[str]:
    folder = runs_folder / SUPERVISED
    folder.mkdir()
    (folder / "supervised.json").write_text("{}")
    losses = [{"step": step, "train/loss": 6.0 - step / 4, "validation/loss": 6.0 - step / 4} for step in range(21)]
    (folder / "metrics.jsonl").write_bytes(b"".join(map(line, losses)))
    yield SUPERVISED
    shutil.rmtree(folder)


@pytest.fixture
def dull(runs_folder: Path) -> Iterator[str]:
    """Run of two tasks, of which one has reward 0, with groups whose siblings all earn the same."""
    folder = runs_folder / DULL
    write_run(folder, steps=20, rollouts=160)
    records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record |= {name: 0.0 for name in ("task/countdown/finished_reward_mean",) if name in record}
        record |= {name: 1.0 for name in ("rollout/zero_variance_groups",) if name in record}
    (folder / "metrics.jsonl").write_bytes(b"".join(map(line, records)))
    with (folder / "rollouts.jsonl").open("ab") as file:
        for step, rewards in ANSWERS.items():
            for sibling, reward in enumerate(rewards):
                said = [
                    {"role": "user", "content": "Sort: Bo, Al"},
                    {"role": "assistant", "content": f"earns {reward}"},
                ]
                labels = {"step": step, "phase": "validation", "task": "sort", "group_id": "validation-0"}
                status = "completed" if reward else "error_parse"
                ids = {"rollout_id": f"validation-0/{sibling}", "sibling": sibling}
                file.write(line({**labels, **ids, "status": status, "reward": reward, "messages": said}))
    yield DULL
    shutil.rmtree(folder)


async def axis(page: Any, name: str) -> list[str]:
    """Labels of the curves on a chart of the overview; empty if it is hidden."""
    hero = page.locator(f"section.hero[aria-label='{name}']")
    if not await hero.is_visible():
        return []
    text = await hero.locator(".chart").get_attribute("aria-label")
    return [part.split(", last")[0] for part in text.removeprefix(f"{name} by step: ").split("; ")]


async def test_supervised_losses_have_their_own_axis(open_page: OpenPage, supervised: str) -> None:
    page = await open_page(f"#runs={FIRST},{supervised}")
    assert await axis(page, "Reward") == [f"{FIRST}, in training", f"{FIRST}, held out"]
    assert await axis(page, "Loss") == [f"{supervised}, in training", f"{supervised}, held out"]
    heads = await page.locator(".comparison thead th").all_inner_texts()
    assert "Held-out reward" in heads
    assert "Held-out loss" in heads
    await page.get_by_role("tab", name="Curves").click()
    for title, run in (("Loss", FIRST), ("Loss of supervised training", supervised)):
        panel = page.locator(f'section.panel[aria-label="{title}"]')
        await panel.scroll_into_view_if_needed()
        await until(page, "panel => panel.getAttribute('aria-busy') === 'false'", arg=await panel.element_handle())
        assert {curve["run"] for curve in await panel.evaluate("element => element.panel.data()")} == {run}


async def test_each_task_has_a_verdict_and_zero_reward_is_flagged(open_page: OpenPage, dull: str) -> None:
    page = await open_page(f"#runs={dull}")
    rows = page.locator(".tasks tbody tr")
    verdicts = {
        await row.locator("th").inner_text(): await row.locator("td").first.inner_text() for row in await rows.all()
    }
    assert verdicts == {"sort": "learns", "countdown": "earns nothing"}
    assert {"sort", "countdown"} <= set(await axis(page, "Reward"))
    said = await page.locator(".verdicts").inner_text()
    assert "The task countdown earns nothing" in said
    assert "step 3: for 3 steps all rollouts of every group earned the same reward" in said, (
        "warnings of the run itself are shown, too"
    )
    assert await page.locator(".notice").count() == 0


async def test_verdict_links_to_its_rollouts(open_page: OpenPage, dull: str) -> None:
    page = await open_page(f"#runs={dull}")
    verdict = page.locator(".verdict", has_text="of the groups teach nothing")
    await verdict.get_by_role("link").click()
    await page.locator(".rollouts").wait_for()
    assert "rollouts.step_min=11&rollouts.phase=train" in page.url
    await until(page, "viewer.view.answer")
    rows = await page.evaluate("viewer.view.answer.rows.map(row => [row.step, row.phase])")
    assert rows
    assert all(step >= 11 and phase == "train" for step, phase in rows)


async def test_cores_are_shown_as_a_waterfall(open_page: OpenPage, supervised: str, runs_folder: Path) -> None:
    step = {"processor/available_s": 8.0, "processor/trainer_s": 6.0, "processor/trainer_steps_s": 5.0}
    (runs_folder / supervised / "metrics.jsonl").write_bytes(line({"step": 1, "train/loss": 1.0, **step}))
    page = await open_page(f"#runs={supervised}")
    rows = page.get_by_role("region", name="Where the cores' time goes").locator("tbody tr")
    assert [(await row.inner_text()).split("\t")[:3] for row in await rows.all()] == [
        ["trainer steps", "5 s", "63%"],
        ["trainer, besides steps", "1 s", "13%"],
        ["idle, or used by other programs", "2 s", "25%"],
    ]
    lefts = await rows.locator(".fall span").evaluate_all("bars => bars.map(bar => bar.style.marginLeft)")
    assert lefts == ["0%", "62.5%", "75%"]


async def test_same_prompt_is_shown_over_time_by_its_median_rollout(open_page: OpenPage, dull: str) -> None:
    page = await open_page(f"#runs={dull}")
    prompts = page.locator(".prompts")
    assert "Answers to one prompt over time" in await prompts.inner_text()
    assert await prompts.locator(".opening").inner_text() == "user\nSort: Bo, Al"
    said = [await one.inner_text() for one in await prompts.locator("article.transcript").all()]
    assert [text.splitlines()[0] for text in said] == [f"Step {step}" for step in ANSWERS]
    for text, rewards in zip(said, ANSWERS.values(), strict=True):
        assert f"earns {sorted(rewards)[1]}" in text
        assert "error parse" not in text
    await prompts.get_by_role("link", name="Step 10").click()
    await page.locator(".detail-title").wait_for()
    assert "step 10 · validation" in await page.locator(".detail-title").inner_text()


async def test_tabs_share_the_selected_step(open_page: OpenPage) -> None:
    page = await open_page(f"#runs={FIRST}")
    over = page.locator("section.hero .u-over").first
    box = await over.bounding_box()
    await page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + 30)
    await until(page, "location.hash.includes('at=30')")
    assert (await page.locator("section.step h2").inner_text()) == "Step 30"
    await until(page, "document.querySelectorAll('section.step .step-rollouts li').length === 4")
    assert await page.get_by_role("button", name="step 30").is_visible()
    await page.keyboard.press("2")
    await until(page, "document.querySelector('section.panel')?.panel.chart?.marked === 30")
    await page.keyboard.press("3")
    await until(page, "viewer.view.detail?.record?.step === 30")
    # A click by coordinates could miss the row, because the list may replace it at that moment.
    await page.locator(".list .row", has_text="step 32").first.evaluate("row => row.click()")
    await until(page, "viewer.cursor.chosen === 32")
    await page.keyboard.press("4")
    await until(page, "viewer.view.schedule?.panels")
    assert await page.locator(".schedule-legend b").first.inner_text() == "step 32"
    await page.keyboard.press("x")
    assert await page.locator(".schedule-legend b").count() == 0
    assert "at=" not in page.url


async def test_question_mark_lists_the_keyboard_shortcuts(open_page: OpenPage) -> None:
    page = await open_page(f"#tab=rollouts&runs={FIRST}")
    await page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    assert "its messages, tokens or siblings" in await dialog.inner_text()
    await page.keyboard.press("1")
    assert await page.get_by_role("tab", selected=True).inner_text() == "Rollouts", "the dialog keeps keys from the tab"
    await page.keyboard.press("Escape")
    assert not await dialog.is_visible()
    await page.keyboard.press("1")
    await until(page, "document.querySelector('[role=tab][aria-selected=true]').innerText === 'Overview'")
    await page.get_by_role("button", name="Keys").click()
    assert "its messages" not in await dialog.inner_text()


async def test_keys_reach_the_tab_after_the_shortcut_list_closes(open_page: OpenPage) -> None:
    page = await open_page(f"#tab=rollouts&runs={FIRST}")
    await page.keyboard.press("?")
    await page.evaluate("""() => {
        const list = document.querySelector("dialog.keys"), press = key =>
            list.querySelector("button").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        press("Escape");
        press("1");
    }""")
    await until(page, "document.querySelector('[role=tab][aria-selected=true]').innerText === 'Overview'")


async def shown_runs(page: Any) -> list[str]:
    names = page.locator("#run-list .name")
    return [await one.inner_text() for one in await names.all() if await one.is_visible()]


async def test_runs_are_filtered_by_words_and_settings(open_page: OpenPage, supervised: str) -> None:
    page = await open_page(f"#{BOTH}")
    search = page.get_by_label("Search runs")
    for text, expected in {
        "first": [FIRST],
        "lr=0.001": [SECOND],
        "training.lr<0.001": [FIRST],
        "kind=sft": [supervised],
        "kind!=sft steps>=60": [SECOND, FIRST],
        "/^2026010[12]/ task=sort": [SECOND, FIRST],
        "nothing": [],
    }.items():
        await search.fill(text)
        names = "[...document.querySelectorAll('#run-list .name')].map(one => one.innerText).join()"
        await until(page, f"names => {names} === names", arg=",".join(expected))
    assert await page.evaluate("viewer.list.selected().map(run => run.id)") == [SECOND, FIRST]


async def test_runs_are_grouped_and_their_curves_averaged(open_page: OpenPage, supervised: str) -> None:
    page = await open_page(f"#tab=curves&smoothing=0&{BOTH}")
    await until(page, "[...viewer.list.group.options].some(one => one.value === 'training.lr')")
    await page.get_by_label("Group runs by").select_option("kind")
    assert await page.locator(".run-group b").all_inner_texts() == ["sft", "train"]
    assert await shown_runs(page) == [supervised, SECOND, FIRST]
    await page.get_by_role("button", name="mean of each group").click()
    panel = page.locator('section.panel[aria-label="Gradient norm"]')
    await panel.scroll_into_view_if_needed()
    await until(page, "document.querySelector('section.panel[aria-label=\"Gradient norm\"]').panel.data().length === 1")
    (mean,) = await panel.evaluate("element => element.panel.data()")
    each = [
        await page.evaluate("run => viewer.source.curves(run, { names: ['train/grad_norm'] })", run)
        for run in (FIRST, SECOND)
    ]
    values = [one["curves"]["train/grad_norm"]["values"] for one in each]
    assert mean["values"] == pytest.approx([sum(pair) / 2 for pair in zip(*values, strict=True)])
    assert mean["low"] == [min(pair) for pair in zip(*values, strict=True)]
    await page.get_by_label("Group runs by").select_option("training.lr")
    assert await page.locator(".run-group b").all_inner_texts() == ["no training.lr", "lr 0.001", "lr 0.0003"]
    assert "runs.group=training.lr&runs.mean=1" in page.url


async def test_renamed_run_keeps_its_name_after_reload(open_page: OpenPage) -> None:
    page = await open_page(f"#{BOTH}")
    item = page.locator("#run-list li", has_text=FIRST)
    await item.hover()
    await item.get_by_role("button", name=f"Rename {FIRST}").click()
    await page.keyboard.type("baseline")
    await page.keyboard.press("Enter")
    assert await shown_runs(page) == [SECOND, "baseline"]
    await page.reload()
    await until(page, "window.viewer?.settled")
    assert await shown_runs(page) == [SECOND, "baseline"]
    assert "baseline" in await page.locator(".comparison tbody").first.inner_text()


async def test_comparison_table_has_a_baseline_and_sorts_by_column(open_page: OpenPage) -> None:
    page = await open_page(f"#{BOTH}")
    table = page.locator(".comparison table").first
    heads = await table.locator("thead th").all_inner_texts()
    assert "training.lr" in heads
    place = heads.index("Held-out reward, to baseline")
    cells = [await row.locator("th, td").all_inner_texts() for row in await table.locator("tbody tr").all()]
    assert cells[0][place] == "baseline"
    first, second = (float(row[heads.index("Held-out reward")].split(" → ")[1]) for row in cells)
    assert float(cells[1][place].replace("−", "-")) == pytest.approx(second - first, abs=2e-3)
    await table.get_by_role("button", name="training.lr").click()
    names = [await one.inner_text() for one in await table.locator("tbody th").all()]
    assert names == [SECOND, FIRST]
    await table.get_by_role("button", name="training.lr").click()
    assert [await one.inner_text() for one in await table.locator("tbody th").all()] == [FIRST, SECOND]
    await table.get_by_role("button", name=FIRST).click()
    await until(page, "[...document.querySelectorAll('.comparison tbody tr')][0].innerText.includes('baseline')")
    assert f"baseline={FIRST}" in page.url


@pytest.fixture
def shapes(runs_folder: Path) -> Iterator[list[str]]:
    names = ["collapsed", "solved", "two_validations"]
    for name in names:
        write_shape(runs_folder / name, SHAPES[name])
    yield names
    for name in names:
        shutil.rmtree(runs_folder / name)


async def test_page_begins_with_the_verdict_of_a_person(open_page: OpenPage, shapes: list[str]) -> None:
    for name in shapes:
        page = await open_page(f"#runs={name}")
        verdict = page.locator(".verdicts li.verdict").first
        assert SHAPES[name].says.lower() in (await verdict.inner_text()).lower()
        assert SHAPES[name].tone in str(await verdict.get_attribute("class")).split()
    said = await page.locator(".gain").inner_text()
    assert "2 measurements, at steps 0 and 60" in said


async def test_no_line_joins_two_validations(open_page: OpenPage, shapes: list[str]) -> None:
    plot = "viewer.view.heroes[0].chart.plot"
    joined = f"{plot}.series.slice(1).filter(line => !line.paths || line.paths({plot}, 1, 0, 1)).length"
    numbers = {}
    for name in shapes:
        page = await open_page(f"#runs={name}")
        numbers[name] = (
            await page.evaluate(joined),
            await page.evaluate(f"{plot}.series.length - 1"),
        )
    assert numbers["collapsed"][0] == numbers["collapsed"][1], "the smoothed line, the rewards and the validations"
    assert numbers["two_validations"][0] == numbers["two_validations"][1] - 1
