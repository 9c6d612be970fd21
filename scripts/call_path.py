"""Path of calls from a program's start to a function, across asyncio tasks, for counting calls and frames.

Example, which collects the frames of titan_rl between `titan_rl.train` and a trainer's `step`:

    paths = []

    class Trainer:
        async def step(self, samples):
            paths.append(calls_to_here())
            ...

    with tasks_noted():
        titan_rl.train(config, trainer=Trainer(), ...)
    print(len(paths[0]), *paths[0])
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio import base_events
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

PACKAGE = Path(__file__).parents[1] / "titan_rl"

_creators: WeakKeyDictionary[asyncio.Task[Any], list[str]] = WeakKeyDictionary()


@contextlib.contextmanager
def tasks_noted() -> Generator[None]:
    """Context manager that records the calls that create each asyncio task."""
    create_task = base_events.BaseEventLoop.create_task

    def noting(self: Any, *args: Any, **options: Any) -> asyncio.Task[Any]:
        path = calls_to_here()
        task = create_task(self, *args, **options)
        _creators[task] = path
        return task

    base_events.BaseEventLoop.create_task = noting  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        base_events.BaseEventLoop.create_task = create_task


def calls_to_here() -> list[str]:
    """Functions of titan_rl on the call stack, outermost first, each as "module:function".

    A task's path begins with the path of the call that created it.
    """
    task = None
    with contextlib.suppress(RuntimeError):
        task = asyncio.current_task()
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if task is not None and task in _creators and file.endswith("asyncio/events.py"):
            return [*_creators[task], *reversed(frames)]
        if file.startswith(f"{PACKAGE}/"):
            frames.append(f"{Path(file).relative_to(PACKAGE).with_suffix('')}:{function}")
        frame = frame.f_back
    return frames[::-1]
