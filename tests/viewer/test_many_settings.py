"""Runs with long names and many settings at 1440 pixels, and runs whose files are incomplete."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from viewer.page_helpers import OpenPage, serving, until

from benchmarks.synthetic_run import line, write_run
from titan_rl.core.run_files import DAMAGED, read_status
from titan_rl.viewer.runs import RunReader

pytestmark = pytest.mark.asyncio(loop_scope="session")
NAMES = [f"20260101-00000{i}-alphabet-sort-long-lr=1e-{i + 1}-max_tokens={16 * (i + 1)}-group_size=8" for i in range(6)]
LONG = "generation.engine_options.speculative_config_of_the_draft_model"


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "runs"
    for place, name in enumerate(NAMES):
        write_run(folder / name, steps=20, rollouts=16, seed=place)
        config = folder / name / "config.toml"
        text = config.read_text().replace("lr = 0.0003", f"lr = {10.0 ** -(place + 1)}")
        config.write_text(f"{LONG} = {place}\n{text}".replace("seed = 0\n", "seed = 0\nname = ''\n", 1))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def viewer_url(runs_folder: Path) -> AsyncGenerator[str]:
    async with serving(runs_folder) as url:
        yield url


@pytest.mark.parametrize("count", [2, 6])
async def test_differing_settings_are_in_view_at_1440_pixels(open_page: OpenPage, count: int) -> None:
    page = await open_page(f"#runs={','.join(NAMES[:count])}", width=1440, height=900)
    heads = "[...document.querySelectorAll('.comparison thead th')]"
    right = await until(page, f"{heads}.find(one => one.textContent === 'training.lr')?.getBoundingClientRect().right")
    assert right <= 1440
    assert await page.evaluate(f"{heads}[0].textContent") == "Run"


async def test_list_of_runs_does_not_scroll_sideways(open_page: OpenPage) -> None:
    page = await open_page(f"#runs={','.join(NAMES)}", width=1440, height=900)
    await until(page, f"document.querySelector('.run-choices').textContent.includes('by {LONG}')")
    assert await page.evaluate("(list => list.scrollWidth <= list.clientWidth)(document.querySelector('.runs'))")
    widths = await page.evaluate(
        "[...document.querySelectorAll('.run-choices select')].map(one => one.getBoundingClientRect().right)"
    )
    assert max(widths) <= await page.evaluate("document.querySelector('.runs').getBoundingClientRect().right")


async def test_settings_that_differ_from_their_defaults_are_marked(open_page: OpenPage) -> None:
    page = await open_page(f"#tab=settings&runs={NAMES[0]}")
    marked = [
        " ".join((await row.inner_text()).split()) for row in await page.locator(".settings-table tr.differs").all()
    ]
    assert marked == ["training.steps 20 100"], "the seed has its default, and the rate has none that is fixed"
    rows = await page.locator(".settings-table tbody tr").count()
    await page.get_by_label("show defaults too").uncheck()
    await until(page, "document.querySelectorAll('.settings-table tbody tr').length === 1")
    assert rows > 5


async def test_numbers_of_narrow_steps_are_drawn_above_the_bands(open_page: OpenPage) -> None:
    page = await open_page(f"#runs={NAMES[0]}")
    drawn = await page.evaluate("""async () => {
      const { paint } = await import("viewer/timeline/paint");
      const calls = [];
      const pen = new Proxy({}, {
        get: (_, name) => (name === "measureText" ? text => ({ width: 7 * text.length }) : (...args) => {
          if (name === "fillRect" && args[1] === 24) calls.push(["band", args[0], args[2]]);
          if (name === "fillText" && args[2] === 35) calls.push(["text", args[1], args[0]]);
          return { addColorStop() {} };
        }),
        set: () => true,
      });
      const steps = Array.from({ length: 40 }, (_, i) => [1000 + i, i, i + 1]);
      const colours = new Proxy({}, { get: () => new Proxy({}, { get: () => ["red", "red"] }) });
      const window = { from: 0, to: 40, x: (time, width) => (time / 40) * width };
      const placed = { rows: [] };
      paint(pen, { width: 600, height: 80, gutter: 100, scroll: 0, window, placed, steps, syncs: [], colours });
      return calls;
    }""")
    labels = [(i, x, x + 7 * len(text)) for i, (kind, x, text) in enumerate(drawn) if kind == "text" and text.isdigit()]
    assert len(labels) > 5
    for at, left, right in labels:
        later = [(x, x + width) for kind, x, width in drawn[at:] if kind == "band"]
        assert not [band for band in later if band[0] < right and band[1] > left], "no band covers a number"


async def test_incomplete_files_of_a_run_are_named(tmp_path: Path) -> None:
    def warnings(folder: Path) -> list[str]:
        return [text for text in RunReader(folder).summary()["warnings"] if not text.startswith("step ")]

    folder = write_run(tmp_path / "run", steps=32, rollouts=0)
    assert warnings(folder) == []
    metrics = folder / "metrics.jsonl"
    records = [json.loads(text) for text in metrics.read_text().splitlines()]
    metrics.write_bytes(b"".join(line(record) for record in records if record["step"] <= 16))
    assert warnings(folder) == ["the metrics end at step 16 of 32: the rest of metrics.jsonl is missing"]
    config = folder / "config.toml"
    settings = config.read_text()
    config.write_text(f"{settings}\n[training.stop_at]\nreward = 0.9\n")
    assert warnings(folder) == [], "the run may have ended before its last step"
    (folder / "checkpoints" / "step-000024").mkdir(parents=True)
    assert warnings(folder) == ["the metrics end at step 16 of 24: the rest of metrics.jsonl is missing"]
    (folder / "checkpoints" / "step-000024").rmdir()
    config.write_text("[")
    assert warnings(folder)[0].startswith("config.toml cannot be read")
    config.unlink()
    assert warnings(folder)[0].startswith("config.toml is missing: settings, tasks")


async def test_damaged_status_is_not_taken_for_a_kill(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4, rollouts=0)
    (folder / "status.json").write_text('{"state": "fini')
    status: Any = read_status(folder)
    assert (status.state, status.reason) == ("failed", DAMAGED)
    (folder / "status.json").unlink()
    assert "killed" in read_status(folder).reason
