"""Page of the viewer: curves, zooming, keyboard, and the settings tab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from viewer.page_helpers import FIRST, SECOND, OpenPage, until

pytestmark = pytest.mark.asyncio(loop_scope="session")
BOTH = f"runs={FIRST},{SECOND}"


def values(folder: Path, run: str, metric: str) -> tuple[list[int], list[float]]:
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line[metric]) for line in lines if metric in line]
    return [step for step, _ in found], [value for _, value in found]


async def drawn(page: Any, title: str) -> list[dict[str, Any]]:
    """Wait until a panel is drawn, and return its curves."""
    panel = page.locator(f'section.panel[aria-label="{title}"]')
    await panel.scroll_into_view_if_needed()
    await until(page, "panel => panel.getAttribute('aria-busy') === 'false'", arg=await panel.element_handle())
    return await panel.evaluate("element => element.panel.data()")


async def test_curves_equal_the_written_metrics(open_page: OpenPage, runs_folder: Path) -> None:
    page = await open_page(f"#tab=curves&smoothing=0&{BOTH}")
    first, second = sorted(await drawn(page, "Gradient norm"), key=lambda curve: curve["run"])
    for curve, run in ((first, FIRST), (second, SECOND)):
        assert (curve["x"], curve["values"]) == values(runs_folder, run, "train/grad_norm")


async def test_smoothing_is_a_distance_weighted_mean_of_previous_values(open_page: OpenPage) -> None:
    page = await open_page("#tab=curves&metrics=nothing")
    smoothed = await page.evaluate(
        """async () => {
            const { smooth } = await import("viewer/curves/smoothing");
            return [smooth([1, 2, 3], [1, 2, 4], 0.5), smooth([1, 3], [1, 2], 0.5),
                    smooth([1, 2, 3], [1, null, 3], 0.5), smooth([1, 2], [5, 7], 0)];
        }"""
    )
    assert smoothed == [
        [1, 2.5 / 1.5, pytest.approx((4 + 2 / 2 + 1 / 4) / 1.75)],
        [1, pytest.approx((2 + 1 / 4) / 1.25)],
        [1, None, pytest.approx((3 + 1 / 4) / 1.25)],
        [5, 7],
    ]


async def test_later_of_two_equal_curves_is_dashed(open_page: OpenPage) -> None:
    page = await open_page(f"#tab=curves&metrics=nothing&runs={FIRST}")
    dashes = await page.evaluate(
        """async () => {
            const { Chart } = await import("viewer/curves/chart");
            const chart = new Chart(document.body.appendChild(document.createElement("div")), { sync: false });
            const line = (colour, y) => ({ label: "a", colour: `var(--run-${colour})`, x: [1, 2], y });
            chart.draw([line(1, [1, 2]), line(2, [1, 2]), line(3, [1, 3])], { smoothing: 0, x: "step" });
            chart.close();
            return chart.lines.map(({ dash }) => Boolean(dash));
        }"""
    )
    assert dashes == [False, True, False]


async def test_zoom_is_shared_linked_and_survives_new_data(open_page: OpenPage, runs_folder: Path) -> None:
    page = await open_page(f"#tab=curves&runs={SECOND}", width=1600)
    await drawn(page, "Reward")
    over = page.locator('section.panel[aria-label="Reward"] .u-over')
    box = await over.bounding_box()
    await page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    await page.mouse.down()
    await page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
    await page.mouse.up()
    ranges = """() => [...document.querySelectorAll("section.panel")].map(one => one.panel.chart?.plot)
        .filter(Boolean).slice(0, 4).map(({ scales }) => [scales.x.min, scales.x.max])"""
    await until(page, "location.hash.includes('from=')")
    zoomed = await page.evaluate(ranges)
    assert zoomed[0] == [pytest.approx(16, abs=1), pytest.approx(30.5, abs=1)]
    assert all(one == pytest.approx(zoomed[0], rel=1e-6) for one in zoomed)
    metrics = runs_folder / SECOND / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 61, "time_s": 122.0, "rollout/reward_mean": 0.75}) + "\n")
    await until(
        page,
        """() => document.querySelector('section.panel[aria-label="Reward"]').panel.data()
            .some(one => one.x.at(-1) === 61)""",
    )
    assert (await page.evaluate(ranges))[0] == pytest.approx(zoomed[0], rel=1e-6)
    assert await page.evaluate("location.hash") == page.url[page.url.index("#") :]
    await page.keyboard.press("Escape")
    await until(page, "!location.hash.includes('from=')")
    assert (await page.evaluate(ranges))[0] == [1, 61]


async def test_arrows_switch_tabs_and_slash_searches(open_page: OpenPage) -> None:
    page = await open_page(f"#runs={FIRST}")
    tab = page.get_by_role("tab", selected=True)
    await tab.focus()
    seen = [await tab.inner_text()]
    for _ in range(await page.get_by_role("tab").count()):
        await page.keyboard.press("ArrowRight")
        seen.append(await tab.inner_text())
        assert await tab.evaluate("element => element === document.activeElement")
    assert seen[0] == seen[-1] == "Overview"
    assert len(set(seen)) == len(seen) - 1
    await page.keyboard.press("ArrowRight")
    await drawn(page, "Reward")
    await page.keyboard.press("/")
    await page.keyboard.type("grad norm")
    await until(page, "document.querySelectorAll('section.panel').length === 1")
    assert await page.locator("section.panel h3").inner_text() == "train/grad_norm"
    await page.keyboard.press("Escape")
    await until(page, "document.querySelectorAll('section.panel').length > 10")


async def test_only_visible_panels_are_fetched(open_page: OpenPage) -> None:
    page = await open_page(f"#tab=curves&runs={FIRST}", height=500)
    await drawn(page, "Reward")
    panels = await page.evaluate("window.viewer.view.panels.map(one => Boolean(one.chart))")
    assert panels[0]
    assert not panels[-1]


async def test_settings_tab_shows_differences(open_page: OpenPage) -> None:
    page = await open_page(f"#tab=settings&{BOTH}")
    rows = page.locator(".settings-table tbody tr")
    await rows.first.wait_for()
    assert [await row.locator("th, td").all_inner_texts() for row in await rows.all()] == [
        ["training.lr", "0.001", "0.0003"]
    ]
    await page.get_by_label("show equal settings too").check()
    await page.get_by_role("row", name="tasks.1.name countdown countdown").wait_for()
