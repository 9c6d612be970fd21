"""Timeline tab: spans and idle time of each lane, in the visible range and in a selection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from viewer.page_helpers import OpenPage, until

from titan_rl.viewer.html import report_page

pytestmark = pytest.mark.asyncio(loop_scope="session")

HARM = "<img src=x onerror=window.harmed=1>\u202e"
OpenTimeline = Callable[..., Any]


def lane(process: str, name: str, kind: str, spans: list[Any]) -> dict[str, Any]:
    return {"process": process, "lane": name, "kind": kind, "spans": spans}


def span(start: float, end: float, name: str, depth: int = 0, **args: Any) -> list[Any]:
    return [start, end, name, {"depth": depth, **args}]


LANES = [
    lane("env", "rollout", "environment", [span(0, 4, HARM, rollout="g0/1"), span(6, 9, "rollout")]),
    lane("trainer", "rank 0", "trainer", [
        span(0, 5, "wait for rollouts", idle=True), span(5, 9, "train", step=1), span(5, 7, "forward", 1),
        span(9, 10, "publish", version=1), span(10, 16, "wait for rollouts", idle=True), span(16, 20, "train", step=2),
    ]),
    lane("generator-1", "engine", "generator", [span(0, 10, "busy", share=0.25), span(10, 20, "generating")]),
]  # fmt: skip
IDLE = [
    {"lane": "trainer/rank 0", "seconds": 11.0, "share": 0.55},
    {"lane": "generator-1/engine", "seconds": 7.5, "share": 0.375},
]
TIMELINE = {
    "from": 0.0,
    "to": 20.0,
    "lanes": LANES,
    "idle": IDLE,
    "syncs": [[10.0, 1], [20.0, 2]],
    "steps": [[1, 0.0, 10.0], [2, 10.0, 20.0]],
    "bottleneck": {"name": "generation", "share": 0.55, "sentence": "The trainer waits for rollouts 55% of the time."},
}  # fmt: skip
CURVES = {
    "train/staleness_mean": {"steps": [1, 2], "values": [0.5, 1.5]},
    "train/staleness_max": {"steps": [1, 2], "values": [1.0, 3.0]},
    "scheduling/accepted_tokens_mean": {"steps": [1, 2], "values": [20.0, 22.0]},
    "scheduling/generated_tokens_mean": {"steps": [1, 2], "values": [24.0, 25.0]},
}


@pytest.fixture
def open_timeline(open_page: OpenPage, tmp_path: Path) -> OpenTimeline:
    """Open a report with a timeline: `await open_timeline(TIMELINE, "&timeline.from=5", width=600)`."""

    async def open_it(timeline: Any, link: str = "", **options: Any) -> Any:
        run = {"id": "a", "name": "a", "kind": "train", "state": "finished", "steps": 2, "tasks": []}
        of = {
            "summary": {"tiles": [], "warnings": []},
            "metrics": {"metrics": []},
            "timeline": timeline,
            "curves": CURVES,
            "rollouts": {"rows": [], "records": {}},
        }
        path = tmp_path / "report.html"
        path.write_bytes(report_page({"runs": [run], "left_out": [], "of": {"a": of}}, "a"))
        page = await open_page(f"{path.as_uri()}#tab=timeline{link}", **options)
        await until(page, "viewer.view.schedule.panels")
        return page

    return open_it


async def figures(page: Any, *window: float) -> dict[str, Any]:
    return await page.evaluate("window => viewer.view.figures(...window)", list(window))


async def test_lanes_match_the_trace_and_idle_time_adds_up(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(TIMELINE)
    whole = await figures(page)
    assert [one["id"] for one in whole["lanes"]] == ["trainer/rank 0", "generator-1/engine", "env/rollout"]
    trainer, generator, env = whole["lanes"]
    assert [one[:3] for one in trainer["spans"]] == [one[:3] for one in LANES[1]["spans"]]
    assert (trainer["busy"], trainer["idle"]) == (9.0, 11.0)
    assert (generator["busy"], generator["idle"]) == (12.5, 7.5)
    assert (env["busy"], env["idle"]) == (7.0, None), "a gap between two rollouts does not mean an idle machine"
    assert {one["lane"]: one["seconds"] for one in IDLE} == {one["id"]: one["idle"] for one in whole["lanes"][:2]}
    assert [one["idle"] for one in (await figures(page, 4.0, 12.0))["lanes"]] == [3.0, 4.5, None]
    assert await page.locator(".bottleneck").inner_text() == TIMELINE["bottleneck"]["sentence"]
    assert (whole["syncs"], whole["steps"]) == (TIMELINE["syncs"], TIMELINE["steps"])


async def test_idle_times_count_spans_narrower_than_a_pixel(
    open_timeline: OpenTimeline,
) -> None:
    counted = [{"lane": "trainer/rank 0", "seconds": 11.75, "share": 0.5875}, IDLE[1]]
    page = await open_timeline({**TIMELINE, "idle": counted, "seen": [0.0, 20.0]}, width=1200)
    assert (await figures(page))["lanes"][0]["idle"] == 11.75
    await page.locator(".timeline-tables summary").click()
    row = page.locator("table", has_text="Lanes").locator("tr", has_text="trainer · rank 0")
    assert (await row.locator("td").all_inner_texts())[-2:] == ["11.8 s", "59%"]
    assert (await figures(page, 4.0, 12.0))["lanes"][0]["idle"] == 3.0, "other ranges are computed from the drawn spans"


async def test_keys_zoom_pan_and_step_between_spans(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(TIMELINE)
    await page.locator(".timeline-scroll canvas").focus()
    for key in ("+", "+", "ArrowRight"):
        await page.keyboard.press(key)
    window = await figures(page)
    length = 20 / 1.25**4
    assert window["from"] == pytest.approx(10 - length / 2 + 0.2 * length)
    assert window["to"] - window["from"] == pytest.approx(length)
    await until(page, "location.hash.includes('timeline.from=')")
    await page.keyboard.press("0")
    assert ((await figures(page))["from"], (await figures(page))["to"]) == (0, 20)
    for key in ("ArrowDown", "n", "n"):
        await page.keyboard.press(key)
    await until(page, r"document.querySelector('.span-tip').innerText.split('\n')[0] === 'forward'")
    assert "takes 2 s" in await page.locator(".timeline-chart [role=status]").inner_text()
    await page.keyboard.press("Enter")
    assert ((await figures(page))["from"], (await figures(page))["to"]) == (4, 8)


async def test_selected_span_survives_an_update(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(TIMELINE)
    await page.locator(".timeline-scroll canvas").focus()
    for key in ("ArrowDown", "n"):
        await page.keyboard.press(key)
    await page.evaluate("timeline => viewer.view.chart.show(timeline)", TIMELINE)
    await page.keyboard.press("n")
    assert (await page.locator(".span-tip").inner_text()).split("\n")[0] == "forward"


async def test_mouse_zooms_pans_and_selects_steps(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(TIMELINE, width=1200)
    canvas = page.locator(".timeline-scroll canvas")
    box = await canvas.bounding_box()
    gutter, width = await page.evaluate("[viewer.view.chart.gutter, viewer.view.chart.room]")
    at = lambda seconds: box["x"] + gutter + seconds / 20 * width  # noqa: E731
    await page.mouse.move(at(2), box["y"] + 80)
    assert "wait for rollouts" in await page.locator(".span-tip").inner_text()
    await page.mouse.move(at(11), box["y"] + 10)
    await page.mouse.down()
    await page.mouse.move(at(15), box["y"] + 10, steps=3)
    await page.mouse.up()
    assert (await page.locator(".chosen").inner_text()).startswith("Step 2")
    assert "trainer idle 60%" in await page.locator(".chosen").inner_text()
    assert "timeline.steps=2-2" in page.url
    await page.mouse.move(at(5), box["y"] + 80)
    await page.mouse.wheel(0, -240)
    zoomed = await figures(page)
    assert zoomed["to"] - zoomed["from"] == pytest.approx(20 / 1.25**4)
    assert (5 - zoomed["from"]) / (zoomed["to"] - zoomed["from"]) == pytest.approx(0.25, abs=0.01)
    await page.mouse.down()
    await page.mouse.move(at(5) - 100, box["y"] + 80, steps=3)
    await page.mouse.up()
    moved = await figures(page)
    assert moved["from"] - zoomed["from"] == pytest.approx(100 / width * (20 / 1.25**4), rel=0.05)
    await page.get_by_role("button", name="Its rollouts").click()
    await page.locator(".rollouts").wait_for()
    assert "rollouts.step_min=2&rollouts.step_max=2" in page.url


async def test_table_shows_the_same_figures_and_escapes_names(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(TIMELINE, width=500)
    await page.locator(".timeline-tables summary").click()
    rows = [text.split("\t") for text in await page.locator(".figures").first.locator("tbody tr").all_inner_texts()]
    assert rows[0] == ["trainer · rank 0", "trainer", "6", "9 s", "11 s", "55%"]
    assert rows[2][3:] == ["7 s", "–", "–"]
    longest = await page.locator(".figures").nth(1).locator("tbody").inner_text()
    assert "<img src=x onerror=window.harmed=1>RLO" in longest
    assert await page.evaluate("window.harmed") is None
    assert await page.evaluate("document.documentElement.scrollWidth") <= 500


async def test_staleness_and_lengths_are_drawn_below_their_steps(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(TIMELINE)
    assert await page.locator(".schedule-head b:first-child").all_inner_texts() == ["Staleness", "Length"]
    assert await page.evaluate("viewer.view.schedule.of(2)") == {name: one["values"][1] for name, one in CURVES.items()}
    box = await page.locator(".schedule-panel canvas").first.bounding_box()
    await page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 20)
    assert "most 3" in await page.locator(".schedule-legend").first.inner_text()
    assert "step 2" in await page.locator(".schedule-legend").first.inner_text()


async def test_run_without_a_trace_shows_a_note_and_its_schedule(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(None)
    assert "no timeline" in await page.locator(".bottleneck").inner_text()
    assert not await page.locator(".timeline-chart").is_visible()
    assert await page.locator(".schedule-panel").count() == 2


async def test_steps_and_lanes_are_drawn_while_the_trace_loads(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(TIMELINE, width=1200)
    seen = await page.evaluate(
        """async timeline => {
      const answers = [];
      const curve = values => ({ steps: [1, 2], values });
      const curves = { time_s: curve([10, 20]), "time/step_s": curve([9, 8]), "train/staleness_max": curve([1, 3]) };
      const source = {
        timeline: () => new Promise(resolve => answers.push(resolve)),
        curves: async () => ({ curves }),
      };
      const { open } = await import("viewer/timeline/tab");
      const { state, cursor } = viewer;
      const tab = open(viewer.panel, { source, runs: [{ id: "a", name: "a" }], state, cursor });
      const seen = [];
      const see = () => {
        const { sentence, chart, view, reading } = tab;
        seen.push([sentence.textContent, chart.steps, chart.groups.length, view.hidden, reading.hidden]);
      };
      const until = async holds => {
        for (let frame = 0; !holds(); frame++) {
          if (frame > 1000) throw new Error(`never: ${holds}, after ${JSON.stringify(seen)}`);
          await new Promise(requestAnimationFrame);
        }
      };
      await until(() => tab.chart.steps.length && answers.length === 1);
      see();
      answers[0]({ ...timeline, lanes: timeline.lanes.slice(1, 2), read: 0.25 });
      await until(() => answers.length === 2);
      see();
      answers[1]({ ...timeline, read: 1 });
      await tab.opened;
      see();
      tab.close();
      return seen;
    }""",
        TIMELINE,
    )
    assert seen == [
        ["Reading the trace …", [[1, 1, 10], [2, 12, 20]], 0, False, False],
        ["Reading the trace: 25%", TIMELINE["steps"], 1, False, False],
        [TIMELINE["bottleneck"]["sentence"], TIMELINE["steps"], 3, False, True],
    ]


async def test_idle_column_contains_only_shares(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(TIMELINE, width=1200)
    written = await page.evaluate("""async () => {
      const { chart } = viewer.view;
      const texts = [];
      const pen = new Proxy(chart.canvas.getContext("2d"), {
        get(target, name) {
          if (name === "fillText") return (text, x) => texts.push([text, x, target.textAlign]);
          const value = target[name];
          return typeof value === "function" ? value.bind(target) : value;
        },
        set: (target, name, value) => Reflect.set(target, name, value),
      });
      const { paint } = await import("viewer/timeline/paint");
      const { width, height, gutter, window, placed, steps, syncs, colours } = chart;
      paint(pen, { width, height, gutter, scroll: 0, window, placed, steps, syncs, colours });
      return texts.filter(([text, x, align]) => align === "right" && x === gutter - 8 && text).map(([text]) => text);
    }""")
    assert written == ["55%", "55%", "38%", "38%", "idle"]


async def test_two_hundred_lanes_scroll_and_fold(open_timeline: OpenTimeline) -> None:
    lanes = [
        lane(f"generator-{i}", "engine", "generator", [span(j, j + 0.5, "generating") for j in range(20)])
        for i in range(200)
    ]
    idle = [{"lane": f"{one['process']}/engine", "seconds": 9.5, "share": 0.49} for one in lanes]
    page = await open_timeline({**TIMELINE, "lanes": lanes, "idle": idle})
    found = (await figures(page))["lanes"]
    assert [one["id"] for one in found[:3]] == ["generator-0/engine", "generator-1/engine", "generator-2/engine"]
    assert {(one["busy"], one["idle"]) for one in found} == {(10.0, 9.5)}
    scroller = page.locator(".timeline-scroll")
    assert await scroller.evaluate("one => one.scrollHeight > 4000 && one.clientHeight <= 620")
    await scroller.click(position={"x": 20, "y": 56})
    assert await scroller.evaluate("one => one.scrollHeight") < 200


async def test_time_window_follows_a_growing_run(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(TIMELINE)
    seen = await page.evaluate("""async () => {
      const { TimeWindow } = await import("viewer/timeline/window");
      const window = new TimeWindow(20);
      const seen = [];
      const see = () => seen.push([window.from, window.to]);
      window.extend(30); see();
      window.set(20, 30); window.extend(40); see();
      window.follow = true; window.set(30, 40); window.extend(50); see();
      window.pan(-1); window.extend(60); see();
      return seen;
    }""")
    assert seen == [[0, 30], [20, 30], [40, 50], [30, 40]]


async def test_requested_detail_matches_the_pixel_width(open_timeline: OpenTimeline) -> None:
    page = await open_timeline(TIMELINE, width=1200)
    asked = await page.evaluate(
        """async timeline => {
      const asked = [];
      const source = {
        timeline: async (run, query) => { asked.push(query); return timeline; },
        curves: async () => ({ curves: {} }),
      };
      const { open } = await import("viewer/timeline/tab");
      const { state, cursor } = viewer;
      const tab = open(viewer.panel, { source, runs: [{ id: "a", name: "a" }], state, cursor });
      await new Promise(resolve => setTimeout(resolve));
      tab.chart.window.set(5, 7);
      tab.chart.moved();
      while (asked.length < 2) await new Promise(requestAnimationFrame);
      tab.close();
      return asked;
    }""",
        TIMELINE,
    )
    assert asked[0].keys() == {"width"}
    assert 700 < asked[0]["width"] <= 1200
    assert asked[1]["from"] <= 5 < 7 <= asked[1]["to"]
    assert asked[1]["width"] / (asked[1]["to"] - asked[1]["from"]) > 400, "pixels a second"
