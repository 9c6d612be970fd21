"""Overview of runs that a plain reward does not describe: several adapters, leagues, self-play, and faults."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from viewer.page_helpers import OpenPage, serving, until

from benchmarks.synthetic_run import BEGAN, line, write_run
from titan_rl.core.run_files import RunStatus
from titan_rl.viewer.report import write_report
from titan_rl.viewer.runs import RunReader, Runs

pytestmark = pytest.mark.asyncio(loop_scope="session")
PAIR, LEAGUE, DUEL, FLAKY = "20260101-pair", "20260102-league", "20260103-duel", "20260104-flaky"


def rewritten(folder: Path, change: Callable[[dict[str, Any]], dict[str, float]]) -> None:
    """Change the metrics of each step."""
    path = folder / "metrics.jsonl"
    records = [json.loads(text) for text in path.read_text().splitlines()]
    path.write_bytes(b"".join(line(record | change(record)) for record in records))


def write_adapters(folder: Path) -> None:
    for seed, name in enumerate(("grpo", "gspo")):
        write_run(folder / "adapters" / name, steps=20 - 10 * seed, rollouts=80, seed=seed)
    (folder / "config.toml").write_text(
        'seed = 0\n[training]\nsteps = 20\n[[adapters]]\nname = "grpo"\n[[adapters]]\nname = "gspo"\n'
        "training = { steps = 10 }\n"
    )
    steps = [(step, 0) for step in range(1, 21)] + [(20, step) for step in range(1, 11)]
    metrics = [
        {"step": first + second, "time_s": 1.0, "adapter/grpo/step": float(first), "adapter/gspo/step": float(second)}
        for first, second in steps
    ]
    (folder / "metrics.jsonl").write_bytes(b"".join(map(line, metrics)))
    RunStatus("finished", BEGAN, ended=BEGAN + 60).write(folder)


def write_league(folder: Path) -> None:
    write_run(folder, steps=20, rollouts=80)
    rewritten(folder, lambda record: {"league/win_rate": 0.4 + record["step"] / 100, "league/versions": 5.0})


def write_duel(folder: Path) -> None:
    """Self-play of two seats, with a measure of the task in validations."""
    write_run(folder, steps=20, rollouts=80)

    def change(record: dict[str, Any]) -> dict[str, float]:
        if "validation/reward_mean" in record:
            return {"validation/reward_mean": 0.0, "validation/exploitability": 0.5 - record["step"] / 50}
        seats = {"rollout/seat/first/reward_mean": 0.25, "rollout/seat/second/reward_mean": -0.25}
        return {"rollout/finished_reward_mean": 0.0, "rollout/reward_mean": 0.0, **seats}

    rewritten(folder, change)


def write_flaky(folder: Path) -> None:
    write_run(folder, steps=20, rollouts=0)
    rewritten(
        folder, lambda record: {"rollout/finished_fault_fraction": 0.5, "task/sort/finished_fault_fraction": 0.75}
    )
    statuses = [("completed", 1.0), ("completed", 0.5), ("error_env", 0.0), ("error_timeout", 0.0)]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    about = {"step": 20, "phase": "train", "task": "sort", "group_id": "g", "messages": messages, "turns": []}
    rows = [{**about, "sibling": i, "status": status, "reward": reward} for i, (status, reward) in enumerate(statuses)]
    (folder / "rollouts.jsonl").write_bytes(b"".join(map(line, rows)))


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds") / "runs"
    write_adapters(folder / PAIR)
    write_league(folder / LEAGUE)
    write_duel(folder / DUEL)
    write_flaky(folder / FLAKY)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def viewer_url(runs_folder: Path) -> AsyncGenerator[str]:
    async with serving(runs_folder) as url:
        yield url


async def text(page: Any, selector: str) -> str:
    return " ".join((await page.locator(selector).first.inner_text()).split())


async def test_adapters_are_listed_below_their_run_and_their_steps_add_up(runs_folder: Path) -> None:
    runs = Runs([runs_folder / PAIR])
    whole, *adapters = runs.describe()
    assert (whole["id"], whole["steps"], whole["steps_planned"], whole["parent"]) == (PAIR, 30, 30, None)
    assert [(one["id"], one["name"], one["parent"]) for one in adapters] == [
        (f"{PAIR}~{name}", f"{PAIR}/{name}", PAIR) for name in ("grpo", "gspo")
    ]
    assert (whole["named"], adapters[0]["named"]) == (True, False)
    assert runs.reader(f"{PAIR}~gspo") is not None


async def test_report_of_several_adapters_shows_their_curves_and_links_to_them(
    open_page: OpenPage, runs_folder: Path, tmp_path: Path
) -> None:
    report = write_report([runs_folder / PAIR], tmp_path / "report.html")
    page = await open_page(report.as_uri())
    assert "step 30 of 30" in await text(page, ".headline")
    assert await page.locator(".overview > .empty:visible").count() == 0, "there are curves"
    assert "Reward" in await text(page, ".hero:visible")
    table = page.locator(".comparison table").first
    assert await table.locator("tbody tr").count() == 2
    await table.get_by_role("link", name=f"Show {PAIR}/gspo alone").click()
    await until(page, "document.querySelector('.headline h1')?.textContent.endsWith('gspo')")
    assert "step 10 of 10" in await text(page, ".headline")


async def test_curves_of_a_run_of_adapters_include_theirs(open_page: OpenPage) -> None:
    page = await open_page(f"#tab=curves&runs={PAIR}&metrics=finished_reward")
    await until(page, "document.querySelectorAll('.panel').length > 0")
    assert await page.locator(".chip", has_text="gspo").count() == 1


async def test_headline_of_a_league_is_the_win_rate(open_page: OpenPage) -> None:
    page = await open_page(f"#runs={LEAGUE}")
    hero = page.locator(".hero:visible")
    assert await hero.count() == 1, "the reward, which depends on the opponents, has no curve of its own"
    assert "Win rate against earlier versions 0.400→0.600" in await text(page, ".hero:visible")
    assert "Win rate" in await text(page, ".tiles .tile")


async def test_headline_of_self_play_is_the_measure_of_the_task_or_else_the_seats(
    open_page: OpenPage, runs_folder: Path, tmp_path: Path
) -> None:
    page = await open_page(f"#runs={DUEL}")
    shown = await text(page, ".hero:visible")
    assert "Measures of the task on held-out games 0.500→0.100" in shown
    assert "the mean reward says nothing" in shown
    write_duel(tmp_path / "unmeasured")
    path = tmp_path / "unmeasured" / "metrics.jsonl"
    path.write_text(path.read_text().replace("exploitability", "unscored"))
    headline = RunReader(tmp_path / "unmeasured").summary()["headline"]
    assert headline["metrics"] == {
        "rollout/seat/first/reward_mean": "first",
        "rollout/seat/second/reward_mean": "second",
    }
    write_run(tmp_path / "cooperative", steps=20, rollouts=0)
    seats = {"rollout/seat/first/reward_mean": 0.5, "rollout/seat/second/reward_mean": 0.25}
    rewritten(tmp_path / "cooperative", lambda _: seats)
    assert RunReader(tmp_path / "cooperative").summary()["headline"] is None


async def test_share_of_faults_is_shown_beside_rewards(open_page: OpenPage) -> None:
    page = await open_page(f"#runs={FLAKY}&at=20")
    assert "without 50.0% lost to faults" in await text(page, ".tiles .tile")
    assert "75%" in await text(page, ".tasks tbody")
    assert "lost to faults 0.5" in await text(page, ".step header")
    rewards = [await row.inner_text() for row in await page.locator(".step-rollouts li b").all()]
    assert rewards == ["1", "0.5"], "faults are neither the best nor the worst rollout"
    page = await open_page(f"#tab=rollouts&runs={FLAKY}&rollouts.index=0&rollouts.view=siblings")
    await until(page, "document.querySelector('.spread')")
    assert "mean reward 0.75 without the 2 not scored or lost to faults" in await text(page, ".spread")
