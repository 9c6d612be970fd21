"""Make the screenshots in docs/images: `TITAN_RL_SCREENSHOTS=runs pytest tests/viewer/test_screenshots.py`.

The two newest runs in that folder are used. The newest is also shown in progress, after two thirds of its steps.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from viewer.page_helpers import serving, until

from titan_rl.core.run_files import RunStatus
from titan_rl.viewer.runs import find_runs

RUNS = os.environ.get("TITAN_RL_SCREENSHOTS", "")
IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 150_000
WIDE, NARROW = (1600, 1000), (390, 844)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not RUNS, reason="TITAN_RL_SCREENSHOTS does not name a folder of runs"),
]


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Path]:
    """Folder with the two newest runs, and one in progress."""
    newest, other = sorted(find_runs(Path(RUNS)), key=lambda folder: folder.name)[:-3:-1]
    for folder in (newest, other):
        shutil.copytree(folder, tmp_path / "runs" / folder.name, ignore=shutil.ignore_patterns("checkpoints", "export"))
    going = tmp_path / "in-progress" / newest.name
    shutil.copytree(tmp_path / "runs" / newest.name, going)
    records = [json.loads(line) for line in (going / "metrics.jsonl").read_text().splitlines()]
    now = next(record for record in records if record["step"] >= records[-1]["step"] * 2 / 3)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        lines = (going / name).read_text().splitlines(keepends=True)
        (going / name).write_text("".join(line for line in lines if json.loads(line)["step"] <= now["step"]))
    RunStatus("running", time.time() - now["time_s"]).write(going)
    with (going / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path


async def test_take_screenshots(browser: Any, shown: Path) -> None:
    names = sorted(folder.name for folder in find_runs(shown / "runs"))
    one, both = f"runs={names[-1]}", f"runs={names[-1]},{names[0]}"
    async with serving(shown / "in-progress") as url:
        await take(browser, url, "page_in_progress", f"#{one}")
    async with serving(shown / "runs" / names[-1]) as url:
        for theme in ("light", "dark"):
            await take(browser, url, f"page_finished_{theme}", f"#{one}", theme=theme)
            await take(browser, url, f"page_curves_{theme}", f"#tab=curves&{one}", theme=theme)
            tokens = f"#tab=rollouts&{one}&rollouts.index=0&rollouts.view=tokens"
            await take(browser, url, f"page_tokens_{theme}", tokens, theme=theme)
            await take(
                browser,
                url,
                f"page_timeline_{theme}",
                f"#tab=timeline&{one}&timeline.from=60&timeline.to=72",
                theme=theme,
            )
        await take(browser, url, "page_narrow_light", f"#{one}", size=NARROW)
        await take(browser, url, "page_narrow_dark", f"#tab=curves&{one}", size=NARROW, theme="dark")
    async with serving(shown / "runs") as url:
        await take(browser, url, "page_compared_light", f"#tab=curves&{both}")
        await take(browser, url, "page_compared_dark", f"#{both}", theme="dark")


async def take(
    browser: Any, url: str, name: str, at: str, *, size: tuple[int, int] = WIDE, theme: str = "light"
) -> None:
    from PIL import Image  # installed with vLLM, and only used here

    width, height = size
    context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    page = await context.new_page()
    await page.goto(url + at)
    await until(page, "window.viewer?.ready && document.getElementById('panel').innerText.length > 150")
    await page.wait_for_timeout(500)
    whole = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    picture = whole.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    picture.save(IMAGES / f"{name}.png", optimize=True)
    assert (IMAGES / f"{name}.png").stat().st_size <= MAX_BYTES
    await context.close()
