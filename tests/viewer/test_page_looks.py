"""Accessibility of the page, narrow screens, hostile text, and long runs."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from viewer.page_helpers import FIRST, SECOND, OpenPage, until

from benchmarks.synthetic_run import write_run
from titan_rl.core.run_files import RunStatus
from titan_rl.viewer.html import page_file
from titan_rl.viewer.report import write_report

in_browser = pytest.mark.asyncio(loop_scope="session")
BOTH = f"runs={FIRST},{SECOND}"
TABS = ("overview", "curves", "rollouts", "settings")
HOSTILE = "<img src=x onerror=window.hacked=1>"

FILLED = "document.getElementById('panel').innerText.length > 150"

# Each visible text, with its contrast to the background. WCAG exempts disabled elements.
CONTRASTS = """() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = colour => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r / 255, g / 255, b / 255, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (element.closest(":disabled, script, noscript, .skip")) continue;
    const above = [];
    for (let one = element; one; one = one.parentElement) above.unshift(getComputedStyle(one));
    const back = above.reduce((below, style) => over(rgba(style.backgroundColor), below), [1, 1, 1, 1]);
    const opacity = above.reduce((all, style) => all * Number(style.opacity), 1);
    const [r, g, b, a] = rgba(above.at(-1).color);
    const [high, low] = [light(over([r, g, b, a * opacity], back)), light(back)].sort((x, y) => y - x);
    const { fontSize, fontWeight } = above.at(-1);
    const large = parseFloat(fontSize) >= 24 || (parseFloat(fontSize) >= 18.66 && fontWeight >= 700);
    found.push({ text: node.data.trim().slice(0, 40), ratio: (high + 0.05) / (low + 0.05), least: large ? 3 : 4.5 });
  }
  return found;
}"""


@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_text_contrast_meets_wcag(open_page: OpenPage, theme: str) -> None:
    page = await open_page(f"#{BOTH}", color_scheme=theme)
    shown = 0
    for tab in TABS:
        await page.get_by_role("tab", name=tab.title()).click()
        await until(page, FILLED)
        found = await page.evaluate(CONTRASTS)
        assert not [one for one in found if one["ratio"] < one["least"]], tab
        shown += len(found)
    assert shown > 200


def theme(name: str) -> dict[str, str]:
    """Colours of theme.css."""
    light, dark = page_file("theme.css")[0].decode().split(':root[data-theme="dark"]')
    return {
        key: value
        for part in (light, dark)[: 1 + (name == "dark")]
        for key, value in re.findall(r"(--[\w-]+): (#\w{6})", part)
    }


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    lights = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(one), linear(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


# Machado, Oliveira, Fernandes (2009), severity 1, on linear RGB.
AS_SEEN = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def oklab(rgb: list[float]) -> list[float]:
    r, g, b = rgb
    cones = (
        0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
        0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
        0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
    )
    x, y, z = (max(cone, 0) ** (1 / 3) for cone in cones)
    return [
        0.2104542553 * x + 0.7936177850 * y - 0.0040720468 * z,
        1.9779984951 * x - 2.4285922050 * y + 0.4505937099 * z,
        0.0259040371 * x + 0.7827717662 * y - 0.8086757660 * z,
    ]


@pytest.mark.parametrize("seen", AS_SEEN)
@pytest.mark.parametrize("name", ["light", "dark"])
def test_first_run_colours_are_distinct_for_colour_blind_readers(name: str, seen: str) -> None:
    colours = theme(name)
    assert all(contrast(colours[f"--run-{i}"], colours["--card"]) >= 3 for i in range(1, 9))

    def looks(colour: str) -> list[float]:
        rgb = linear(colour)
        return oklab([sum(weight * part for weight, part in zip(row, rgb, strict=True)) for row in AS_SEEN[seen]])

    runs = [looks(colours[f"--run-{i}"]) for i in range(1, 5)]
    nearest = min(sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) ** 0.5 for pair in combinations(runs, 2))
    assert nearest > 0.07


@in_browser
async def test_theme_follows_the_system_until_chosen_and_is_remembered(open_page: OpenPage) -> None:
    page = await open_page(f"#runs={FIRST}", color_scheme="dark")
    shown = "document.documentElement.dataset.theme"
    assert await page.evaluate(shown) == "dark"
    await page.emulate_media(color_scheme="light")
    await until(page, f"{shown} === 'light'")
    for _ in range(2):  # system -> light -> dark
        await page.get_by_role("button", name="Theme").click()
    assert await page.evaluate(shown) == "dark"
    await page.reload()
    await until(page, "window.viewer?.ready")
    assert await page.evaluate(shown) == "dark"


@in_browser
async def test_page_fits_a_narrow_screen(open_page: OpenPage) -> None:
    page = await open_page(f"#{BOTH}", width=390, height=844)
    for tab in TABS:
        await page.get_by_role("tab", name=tab.title()).click()
        await until(page, FILLED)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390, tab


@in_browser
async def test_report_works_without_a_server_and_escapes_hostile_text(
    open_page: OpenPage, runs_folder: Path, tmp_path: Path
) -> None:
    hostile = write_run(tmp_path / f"a {HOSTILE}", steps=4, rollouts=16)
    with (hostile / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, f"rollout/reward/{HOSTILE}": 0.5}) + "\n")
    config = hostile / "config.toml"
    config.write_text(config.read_text().replace('"base"', f"'</script>{HOSTILE}'"))
    out = write_report([runs_folder / FIRST, hostile], tmp_path / "report.html")
    page = await open_page(out.as_uri())
    await until(page, "viewer.list.selected().length === 2")
    for tab in TABS:
        await page.get_by_role("tab", name=tab.title()).click()
        await until(page, FILLED)
    await page.get_by_role("tab", name="Curves").click()
    await page.locator('section.panel[aria-label="Entropy"]').scroll_into_view_if_needed()
    curve: Any = await until(
        page,
        """first => window.viewer.view.panels.find(one => one.spec.title === "Entropy")?.data()
            .filter(({ run }) => run === first).map(({ x, values }) => [x, values])[0]""",
        FIRST,
    )
    lines = [json.loads(line) for line in (runs_folder / FIRST / "metrics.jsonl").read_text().splitlines()]
    entropy = [(line["step"], line["train/entropy"]) for line in lines if "train/entropy" in line]
    assert list(zip(*curve, strict=True)) == entropy
    await page.get_by_role("checkbox", name=HOSTILE).check()
    for tab in TABS:
        await page.get_by_role("tab", name=tab.title()).click()
        await until(page, FILLED)
        assert not await page.locator("img").count()
    assert await page.get_by_text(HOSTILE).count() > 2
    assert not await page.evaluate("window.hacked")


@in_browser
async def test_running_run_updates_until_it_fails(open_page: OpenPage, runs_folder: Path) -> None:
    folder = write_run(runs_folder / "20250101-000000-followed", steps=10, rollouts=16, state="running")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = await open_page(f"#runs={folder.name}")
        await page.locator(".pill.running").wait_for()
        await page.get_by_role("progressbar", name="Steps done").wait_for()
        RunStatus("failed", 1.0, reason="the loss is nan at step 11").write(folder)
    await page.get_by_role("alert").get_by_text("the loss is nan at step 11").wait_for()
    assert not await page.locator(".pill.running").count()


@in_browser
async def test_selected_run_stays_when_another_starts_and_is_reported_when_removed(
    open_page: OpenPage, runs_folder: Path
) -> None:
    chosen, newer = (write_run(runs_folder / f"2029010{day}-000000-x", steps=2, rollouts=8) for day in (1, 2))
    shutil.rmtree(newer)
    page = await open_page()
    await until(page, "viewer.view")
    assert f"runs={chosen.name}" in page.url
    write_run(newer, steps=2, rollouts=8)
    await page.get_by_role("checkbox", name=newer.name).wait_for(state="attached")
    assert await page.evaluate("viewer.list.selected().map(run => run.id)") == [chosen.name]
    shutil.rmtree(chosen)
    await page.get_by_text(f"There is no run {chosen.name} here.").wait_for()
    shutil.rmtree(newer)


@in_browser
async def test_ten_thousand_steps_keep_extremes_and_zoom_to_full_detail(open_page: OpenPage, runs_folder: Path) -> None:
    folder = write_run(runs_folder / "20250102-000000-long", steps=10_000, rollouts=16)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    norms = {line["step"]: line["train/grad_norm"] for line in lines if "train/grad_norm" in line}
    page = await open_page(f"#tab=curves&runs={folder.name}&smoothing=0")
    drawn = """() => window.viewer.view.panels.find(one => one.spec.title === "Gradient norm").data()[0]"""
    await page.locator('section.panel[aria-label="Gradient norm"]').scroll_into_view_if_needed()
    whole: Any = await until(page, drawn)
    assert len(whole["x"]) <= 1001
    assert max(whole["high"]) == max(norms.values())
    assert min(whole["low"]) == min(norms.values())
    await page.evaluate("window.viewer.view.view.set({ from: 4000, to: 4200 })")
    zoomed: Any = await until(page, drawn.replace("data()[0]", "data().find(one => !one.low)"))
    assert dict(zip(zoomed["x"], zoomed["values"], strict=True)) == {step: norms[step] for step in range(4000, 4201)}
