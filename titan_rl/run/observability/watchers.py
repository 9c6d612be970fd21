"""Background tasks of a run, including two watchers: one warns of stalls, the other of missing generators and hosts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import Any, Protocol

from titan_rl.core.console import Console
from titan_rl.run.status import note_waiting

STALL_S = 30.0
STALL_POLL_S = 5.0
SHORTAGE_S = 2.0
SHORTAGE_POLL_S = 0.5


@contextlib.asynccontextmanager
async def background_tasks(**coroutines: Coroutine[Any, Any, object]) -> AsyncGenerator[None]:
    """Run coroutines, named by their keywords, until the block ends. If one of them fails, the block ends with its
    error."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine, name=name) for name, coroutine in coroutines.items()]
        yield
        for task in running:
            task.cancel()


class Progressing(Protocol):
    """Run whose progress can be observed."""

    def progress(self) -> object:
        """Value that changes with every token, answer, rollout and step."""
        ...

    def waits_for(self) -> str:
        """Describe the event for which the run is waiting."""
        ...


async def warn_of_stalls(run: Progressing, console: Console) -> None:
    """Warn when nothing has happened for `STALL_S` seconds, again after twice that time and so on, and when the run
    continues.

    This runs until it is cancelled.
    """
    clock = asyncio.get_running_loop().time
    last, since, limit = run.progress(), clock(), STALL_S
    while True:
        await asyncio.sleep(STALL_POLL_S)
        now, seconds = run.progress(), clock() - since
        if now != last:
            if limit > STALL_S:
                console.warning(f"the run continues, after {seconds:.0f} s")
            last, since, limit = now, clock(), STALL_S
        elif seconds >= limit:
            console.warning(f"nothing has happened for {seconds:.0f} s: {run.waits_for()}")
            limit *= 2


class Resources(Protocol):
    """Generators and trainer that a run needs."""

    def trouble(self) -> str | None:
        """Reason why no request can be answered, or None while enough generators serve."""
        ...

    def trainer_lacks(self) -> str:
        """Resource that the trainer needs to restart, or "" while it lacks nothing. The trainer itself warns about
        it."""
        ...


async def warn_of_shortage(resources: Resources, console: Console, folder: Path) -> None:
    """Warn when requests have had no generator for `SHORTAGE_S`, and when they have one again.

    Shorter gaps are not reported here, because the code that replaces a generator reports the replacement. This runs
    until it is cancelled.

    Args:
        folder: Folder of the run, whose `status.json` tells readers what the run is waiting for.
    """
    clock = asyncio.get_running_loop().time
    since, warned, noted = clock(), "", ""
    while True:
        await asyncio.sleep(SHORTAGE_POLL_S)
        trouble = resources.trouble() or ""
        if not trouble:
            if warned:
                console.warning(f"enough generators serve again, after {clock() - since:.0f} s")
            since, warned = clock(), ""
        elif trouble != warned and clock() - since >= SHORTAGE_S:
            warned = trouble
            console.warning(f"the run waits for generators: {trouble}")
        lacks = {"generators": warned, "trainer": resources.trainer_lacks()}
        if (now := "; ".join(f"{who}: {what}" for who, what in lacks.items() if what)) != noted:
            noted = now
            note_waiting(folder, noted)
