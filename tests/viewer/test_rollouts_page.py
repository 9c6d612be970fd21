"""Rollouts tab: filters, tokens, siblings, keyboard, and hostile text."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from viewer.page_helpers import FIRST, OpenPage, until

from benchmarks.synthetic_run import write_run

pytestmark = pytest.mark.asyncio(loop_scope="session")

Record = dict[str, Any]
HOSTILE = (
    "<script>window.harmed=1</script><img src=x onerror='window.harmed=1'> [link](https://evil.example) "
    "\u202egnp.exe\u202c a\u200bb \x1b[31m\x07 \U000e0041 شكرا 👩\u200d🔬 " + "A" * 3000
)
TOKENS: list[tuple[str, float]] = [
    ("<|im_start|>", -0.01),
    ("", -0.2),
    ("🙂", -0.7),
    ("a b\n", -2.0),
    ("\u202e", -4.0),
    ("<b>", -9.0),
]


def records_of(folder: Path, run: str) -> list[Record]:
    return [json.loads(line) for line in (folder / run / "rollouts.jsonl").read_text().splitlines()]


def record(sibling: int, messages: list[Record], turns: list[Record], **more: Any) -> Record:
    return {
        **{"step": 1, "phase": "train", "task": "sort", "status": "completed", "error": None},
        **{"rollout_id": f"g0/{sibling}", "group_id": "g0", "sibling": sibling},
        **{"reward": 0.25 * sibling, "advantage": sibling - 1.5},
        **{"reward_breakdown": {"similarity": 0.5, "length": -0.25}, "metrics": {"seconds": 0.25}},
        **{"messages": messages, "turns": turns, "num_completion_tokens": 6, "versions": [3, 4]},
        **more,
    }


def turn(pieces: list[str], logprobs: list[float], *, shared: int = 0, prompt: list[str], **more: Any) -> Record:
    tokens = {
        "shared": shared,
        "prompt": {"ids": list(range(100, 100 + len(prompt))), "text": prompt},
        "completion": {"ids": list(range(len(pieces))), "text": pieces, "logprobs": logprobs},
        **more,
    }
    return {
        **{"request_id": "r", "num_prompt_tokens": shared + len(prompt), "num_completion_tokens": len(pieces)},
        **{"finish_reason": "stop", "version_spans": [[3, 2], [4, len(pieces) - 2]], "rewards": {}, "sampling": None},
        "tokens": tokens,
    }


@pytest.fixture(scope="module")
def odd_run(runs_folder: Path) -> Iterator[str]:
    """Run of four siblings: hostile text, tokens of all colours, an error without tokens, and 30,000 tokens."""
    question = {"role": "user", "content": "Sort: Bo, Al"}
    answers = [HOSTILE, "Bo, Al", "Al and Bo", "Al, Bo!"]
    pieces, logprobs = [piece for piece, _ in TOKENS], [value for _, value in TOKENS]
    marked = {"trained": [True] * 5 + [False], "advantages": [-1.0, -0.2, 0.0, 0.3, 1.0, 1.0]}
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    again = turn(["ok"] * 3, [-0.1] * 3, shared=4, prompt=["again"], trained=True, advantages=0.5)
    long = turn([" word"] * 29_999 + ["\n"], [-0.5] * 30_000, prompt=["Q"], trained=True, advantages=1.0)
    said = [{"role": "assistant", "content": text} for text in answers]
    found = {"role": "tool", "tool_call_id": "call_1", "content": "found"}
    fault = {"error": "ZeroDivisionError: division by zero", "error_at": "tasks/sums.py:41 in score"}
    lines = [
        record(0, [question, said[0]], [], status="error_env", reward=None, **fault),
        record(
            1,
            [question, said[1] | {"tool_calls": [call]}, found, {"role": "assistant", "content": "ok"}],
            [turn(pieces, logprobs, prompt=["Q", ":"], **marked), again],
        ),
        record(2, [question, said[2]], [turn(pieces, logprobs, prompt=["Q"])]),
        record(3, [question, said[3]], [long]),
    ]
    name = "20260103-000000-odd"
    folder = write_run(runs_folder / name, steps=2, rollouts=0)
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    yield name
    shutil.rmtree(folder)


async def listed(page: Any) -> list[int]:
    await until(page, "!document.querySelector('.rollouts').hasAttribute('aria-busy')")
    return await page.evaluate("viewer.view.answer.rows.map(row => row.index)")


FILTERS: list[tuple[str, Callable[[Record], bool]]] = [
    ("status=truncated_length", lambda r: r["status"] == "truncated_length"),
    ("task=countdown&phase=validation", lambda r: r["task"] == "countdown" and r["phase"] == "validation"),
    ("reward_min=0.4&reward_max=0.6", lambda r: r["reward"] is not None and 0.4 <= r["reward"] <= 0.6),
    ("step_min=10&step_max=12", lambda r: 10 <= r["step"] <= 12),
    ("group=train-7", lambda r: r["group_id"] == "train-7"),
    ("dropped=true", lambda r: "dropped" in r),
    ("dropped=false&text=DORA", lambda r: "dropped" not in r and "dora" in json.dumps(r["messages"]).lower()),
]


async def test_link_filters_the_rollout_list(open_page: OpenPage, runs_folder: Path) -> None:
    records = records_of(runs_folder, FIRST)
    page = await open_page(f"#tab=rollouts&runs={FIRST}")
    for said, fits in FILTERS:
        link = f"#tab=rollouts&runs={FIRST}" + "".join(f"&rollouts.{part}" for part in said.split("&"))
        view = await page.evaluate_handle("viewer.view")
        await page.evaluate("link => { location.hash = link }", link)
        await page.evaluate(
            "async old => { while (viewer.view === old) await new Promise(requestAnimationFrame) }", view
        )
        found = [i for i, one in enumerate(records) if fits(one)]
        assert await listed(page) == found[:100], said
        assert await page.evaluate("viewer.view.answer.total") == len(found) > 0


async def test_facet_counts_match_the_filtered_list(open_page: OpenPage, runs_folder: Path) -> None:
    records = records_of(runs_folder, FIRST)
    page = await open_page(f"#tab=rollouts&runs={FIRST}")
    await listed(page)
    facets = {}
    for button in await page.locator(".facet[aria-label=Status] button").all():
        facets[await button.get_attribute("data-value")] = int(await button.locator(".times").inner_text())
    assert facets == Counter(one["status"] for one in records)
    await page.locator(".facet[aria-label=Status] button[data-value=error_parse]").click()
    await until(page, "viewer.view.answer.rows.every(row => row.status === 'error_parse')")
    assert await page.locator(".list-count").inner_text() == f"{facets['error_parse']} rollouts"
    assert "rollouts.status=error_parse" in page.url
    await page.get_by_role("button", name="Clear filters").click()
    await until(page, f"viewer.view.answer.total === {len(records)}")


async def test_sorts_and_scrolls_through_all_rollouts(open_page: OpenPage, runs_folder: Path) -> None:
    records = records_of(runs_folder, FIRST)
    page = await open_page(f"#tab=rollouts&runs={FIRST}")
    await listed(page)
    await page.get_by_label("Order").select_option("reward desc")
    await until(page, "viewer.view.answer.rows[0].reward >= viewer.view.answer.rows[99].reward")
    best = max(one["reward"] for one in records if one["reward"] is not None)
    assert await page.evaluate("viewer.view.answer.rows[0].reward") == best
    await page.locator(".list").focus()
    await page.keyboard.press("End")
    last = page.locator(f"#rollout-row-{len(records) - 1}:not(.waiting)")
    await last.wait_for()
    assert await page.locator(".row").count() < 60, "only visible rows are in the DOM"
    assert await last.get_attribute("aria-selected") == "true"


async def test_outdated_answer_is_dropped(open_page: OpenPage) -> None:
    page = await open_page(f"#tab=rollouts&runs={FIRST}")
    await listed(page)
    total = await page.evaluate("""async () => {
      const answers = [];
      const source = { rollouts: () => new Promise(resolve => answers.push(resolve)) };
      const { open } = await import("viewer/rollouts/tab");
      const { state, cursor } = viewer;
      const tab = open(document.createElement("div"), { source, runs: [{ id: "a", name: "a" }], state, cursor });
      const later = tab.ask();
      answers[1]({ total: 2, rows: [] });
      await later;
      answers[0]({ total: 1, rows: [] });
      await new Promise(resolve => setTimeout(resolve));
      tab.close();
      return tab.answer.total;
    }""")
    assert total == 2


async def test_report_filters_like_the_server(open_page: OpenPage, runs_folder: Path) -> None:
    page = await open_page(f"#tab=rollouts&runs={FIRST}")
    await listed(page)
    queries = [dict(part.split("=") for part in said.split("&")) for said, _ in FILTERS if "text" not in said]
    queries += [{"sort": name, "descending": "true"} for name in ("index", "reward", "advantage", "turns", "task")]
    queries += [{"sort": "reward"}, {"text": "kim", "limit": "1000"}, {"offset": "200", "limit": "7"}]
    both = await page.evaluate(
        """async ([run, queries]) => {
          const { filtered } = await import("viewer/source/rows");
          const { rows } = await viewer.source.rollouts(run, { limit: 1000 });
          const short = ({ total, rows, facets: { status, task, phase }, ranges: { step, reward } }) =>
            [total, rows.map(row => row.index), status, task, phase, step, reward];
          const served = await Promise.all(queries.map(query => viewer.source.rollouts(run, query)));
          return queries.map((query, i) => [query, short(filtered(rows, query)), short(served[i])]);
        }""",
        [FIRST, queries],
    )
    for query, embedded, served in both:
        if "text" in query:  # the report has only the beginnings of texts
            assert set(embedded[1]) <= set(served[1])
        else:
            assert embedded == served, query


async def test_token_card_shows_token_details(open_page: OpenPage, odd_run: str) -> None:
    page = await open_page(f"#tab=rollouts&runs={odd_run}&rollouts.index=1&rollouts.view=tokens")
    tokens = page.locator(".segment.completion").first.locator(".t")
    assert await tokens.count() == len(TOKENS)
    shown = [await one.text_content() for one in await tokens.all()]
    assert shown == ["<|im_start|>", "…", "🙂", "a b\n", "RLO", "<b>"]
    names = [[name for name in ("lp0", "lp1", "lp2", "lp3", "lp4", "lp5") if name in classes.split()]
             for classes in [await one.get_attribute("class") for one in await tokens.all()]]  # fmt: skip
    assert names == [["lp0"], ["lp1"], ["lp2"], ["lp3"], ["lp4"], ["lp5"]]
    assert "special" in (await tokens.first.get_attribute("class"))
    await page.locator(".tokens").focus()
    for _ in range(6):
        await page.keyboard.press("ArrowRight")
    card = page.locator(".token-card")
    assert await card.locator(".piece").inner_text() == '"a b\\n"'
    facts = dict(
        zip(await card.locator("dt").all_inner_texts(), await card.locator("dd").all_inner_texts(), strict=True)
    )
    assert facts == {
        "id": "3", "logprob": "−2", "probability": "13.5%", "version": "4", "trained on": "yes", "advantage": "+0.3",
        "position": "5 in the context of turn 1",
    }  # fmt: skip
    said = await page.locator(".token-view [role=status]").inner_text()
    assert "logprob −2" in said
    assert "continues from 4 of the 8 tokens" in await page.locator(".segment.prompt").nth(1).inner_text()


async def test_token_colours_show_advantage_version_and_loss_mask(open_page: OpenPage, odd_run: str) -> None:
    page = await open_page(f"#tab=rollouts&runs={odd_run}&rollouts.index=1&rollouts.view=tokens")
    classes = "[...document.querySelectorAll('.segment.completion')][0].querySelectorAll('.t')"
    await page.locator(".tokens[data-colour=logprob]").wait_for()
    seen = {}
    for name in ("advantage", "version", "mask", "none", "logprob"):
        await page.keyboard.press("c")
        await page.wait_for_selector(f".tokens[data-colour={name}]")
        seen[name] = await page.evaluate(f"[...{classes}].map(one => one.className.split(' ')[1] ?? '')")
        seen[f"{name} legend"] = await page.locator(".legend .t").all_inner_texts()
    assert seen["advantage"] == ["neg4", "neg1", "zero", "pos2", "pos4", "pos4"]
    assert seen["advantage legend"] == ["−1", "−0.75", "−0.5", "−0.25", "0", "+0.25", "+0.5", "+0.75", "+1"]
    assert seen["version"] == ["v0", "v0", "v1", "v1", "v1", "v1"]
    assert seen["version legend"] == ["3", "4"]
    assert seen["mask"] == ["trained"] * 5 + ["masked"]
    assert set(seen["none"]) <= {"", "special"}
    assert seen["logprob legend"] == ["≥ −0.05", "≥ −0.3", "≥ −1", "≥ −2.5", "≥ −5", "< −5"]


COLOURS = [*(f"lp{i}" for i in range(6)), *(f"{sign}{i}" for sign in ("neg", "pos") for i in range(1, 5))]
COLOURS += [*(f"v{i}" for i in range(6)), "trained", "masked"]
CONTRASTS = """names => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = element => {
    const found = rgb(getComputedStyle(element).backgroundColor);
    return found[3] === 0 ? ground(element.parentElement) : found;
  };
  const block = document.querySelector(".segment.completion .block");
  return Object.fromEntries(names.map(name => {
    const span = Object.assign(document.createElement("span"), { className: `t ${name}` });
    block.append(span);
    const [a, b] = [light(rgb(getComputedStyle(span).color)), light(ground(span))];
    span.remove();
    return [name, [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), b]];
  }));
}"""


async def test_token_colours_keep_contrast_and_grow_by_lightness(open_page: OpenPage, odd_run: str) -> None:
    page = await open_page(f"#tab=rollouts&runs={odd_run}&rollouts.index=1&rollouts.view=tokens")
    await page.locator(".segment.completion").first.wait_for()
    for theme in ("light", "dark"):
        await page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        found = await page.evaluate(CONTRASTS, COLOURS)
        assert not {name: contrast for name, (contrast, _) in found.items() if contrast < 4.5}
        for scale in ("lp", "neg", "pos"):  # lightness shows the strength without colour vision
            lightness = [light for name, (_, light) in found.items() if name.startswith(scale)]
            assert lightness == sorted(lightness, reverse=theme == "light")


async def test_hostile_text_is_escaped_and_hidden_characters_are_shown(open_page: OpenPage, odd_run: str) -> None:
    page = await open_page(f"#tab=rollouts&runs={odd_run}&rollouts.index=0", width=500)
    message = page.locator(".message.assistant pre")
    text = await message.text_content()
    assert "<script>window.harmed=1</script><img src=x onerror='window.harmed=1'>" in text
    assert await message.locator(".hidden-character").all_inner_texts() == [
        "RLO", "PDF", "ZWSP", "ESC", "BEL", "U+E0041",
    ]  # fmt: skip
    assert "👩\u200d🔬" in text
    assert not set(text) & {"\u202e", "\u202c", "\u200b", "\x1b", "\x07"}
    assert await page.evaluate("window.harmed") is None
    assert await page.locator(".rollouts :is(a, img, script, iframe)").count() == 0
    assert await page.evaluate("document.documentElement.scrollWidth") <= 500, "long lines wrap"
    failure = page.locator(".failure")
    assert await failure.locator("pre").inner_text() == "ZeroDivisionError: division by zero"
    assert await failure.locator("code").inner_text() == "tasks/sums.py:41 in score"
    await page.keyboard.press("t")
    assert "No turn was played" in await page.locator(".token-view").inner_text()


async def test_tool_calls_and_results_are_shown(open_page: OpenPage, odd_run: str) -> None:
    page = await open_page(f"#tab=rollouts&runs={odd_run}&rollouts.index=1")
    call = page.locator(".tool-call")
    assert (await call.locator("header").inner_text()).split() == ["calls", "look", "call_1"]
    assert json.loads(await call.locator("pre").inner_text()) == {"at": "x"}
    assert "answers call_1" in await page.locator(".message.tool header").inner_text()
    assert "turn 1 · 6 tokens · version 3 → 4" in await page.locator(".message.assistant header").first.inner_text()
    assert [text.split() for text in await page.locator(".breakdown tr").all_inner_texts()] == [
        ["similarity", "0.5"], ["length", "−0.25"],
    ]  # fmt: skip


async def test_siblings_are_shown_side_by_side_best_first(open_page: OpenPage, odd_run: str) -> None:
    page = await open_page(f"#tab=rollouts&runs={odd_run}&rollouts.index=2&rollouts.view=siblings")
    await page.locator(".siblings").wait_for()
    assert await page.locator(".sibling-head .reward").all_inner_texts() == ["0.75", "0.5", "0.25", "–"]
    assert await page.locator(".shared .message").count() == 1
    cells = page.locator(".siblings > .message, .siblings > .gap")
    assert await cells.count() == 12, "three more messages of four siblings, with gaps if one has fewer"
    assert await cells.nth(0).locator("mark").all_inner_texts() == [",", "!"]
    assert await cells.nth(1).locator("mark").count() == 0, "the others are compared with the open sibling"
    await page.keyboard.press("[")
    await until(page, "viewer.view.detail.index === 3")


async def test_keyboard_navigation(open_page: OpenPage, runs_folder: Path) -> None:
    page = await open_page(f"#tab=rollouts&runs={FIRST}")
    await until(page, "viewer.view.detail.index === 0")
    assert "rollouts.index" not in page.url, "the first rollout is open without being selected"
    await page.locator(".list").focus()
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("k")
    await until(page, "viewer.view.detail.index === 1")
    assert "rollouts.index=1" in page.url
    assert await page.evaluate("document.activeElement.className") == "list"
    await page.keyboard.press("Enter")
    await until(page, "document.activeElement.className === 'detail'")
    await page.keyboard.press("t")
    assert await page.locator(".tokens").count() == 1
    await page.keyboard.press("m")
    assert await page.locator(".tokens").count() == 0
    await page.keyboard.press("/")
    await page.keyboard.type("no such text")
    await until(page, "viewer.view.answer?.total === 0")
    assert "No rollout fits" in await page.locator(".list-note").inner_text()
    await page.keyboard.press("Escape")
    assert await page.evaluate("document.activeElement.className") == "list"


async def test_thirty_thousand_tokens_are_laid_out_lazily(open_page: OpenPage, odd_run: str) -> None:
    page = await open_page(f"#tab=rollouts&runs={odd_run}&rollouts.index=3&rollouts.view=tokens")
    await page.locator(".segment.completion").wait_for()
    assert await page.locator(".segment.completion .t").count() == 30_000
    blocks = await page.evaluate(
        "[...document.querySelectorAll('.block')]"
        ".map(one => [one.children.length, getComputedStyle(one).contentVisibility])"
    )
    assert max(size for size, _ in blocks) <= 1200
    assert {visibility for _, visibility in blocks} == {"auto"}
    await page.locator(".tokens").focus()
    await page.keyboard.press("End")
    last = page.locator(".t.current")
    assert await last.text_content() == "\n"
    assert await last.evaluate(
        "one => { const box = one.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight; }"
    )


async def test_completion_ids_can_be_copied(open_page: OpenPage, odd_run: str) -> None:
    page = await open_page(
        f"#tab=rollouts&runs={odd_run}&rollouts.index=1&rollouts.view=tokens",
        permissions=["clipboard-read", "clipboard-write"],
    )
    await page.get_by_role("button", name="Copy completion ids").click()
    await page.get_by_role("button", name="Copied").wait_for()
    assert json.loads(await page.evaluate("navigator.clipboard.readText()")) == [0, 1, 2, 3, 4, 5, 0, 1, 2]
