"""Number of stack frames between a `GenerateFn` and the router's send."""

from __future__ import annotations

import runpy
from pathlib import Path


async def test_at_most_five_frames_from_generate_fn_to_router_send() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "generation_frames.py"))
    frames = await script["frames_to_send"]()
    assert len(frames) <= 5, frames
