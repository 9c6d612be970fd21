"""Runs, server and waiting for tests of the page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn

from benchmarks.synthetic_run import write_run
from titan_rl.viewer.app import make_viewer
from titan_rl.viewer.runs import Runs

FIRST, SECOND = "20260101-000000-first", "20260102-000000-second"
"""Ids of the runs that every server of the tests has."""

OpenPage = Callable[..., Awaitable[Any]]
"""The fixture `open_page`; it gives a `playwright.async_api.Page`."""


def write_first_and_second(folder: Path) -> None:
    """Write two runs of 60 steps. The second has another learning rate."""
    write_run(folder / FIRST, steps=60, rollouts=240)
    write_run(folder / SECOND, steps=60, rollouts=240, seed=1)
    config = folder / SECOND / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.0003\n", "lr = 0.001\n"))


async def until(page: Any, expression: str, arg: Any = None, *, within_s: float = 10) -> Any:
    """Wait until a JavaScript expression, or a function of `arg`, is truthy, and return its value. The page's content
    security policy forbids Playwright's `wait_for_function`, which evaluates text in the page."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + within_s
    while not (found := await page.evaluate(expression, arg)):
        assert loop.time() < limit, f"not true within {within_s} s: {expression}"
        await asyncio.sleep(0.02)
    return found


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncGenerator[str]:
    """Serve the viewer of a folder of runs, and yield its URL."""
    runs = Runs([folder])
    app = make_viewer(runs, look_s=0.05)
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", ws="none", log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done()
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    app.end()
    server.should_exit = True
    await task
    runs.close()
