"""What goes on beside a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def beside(**coroutines: Coroutine[Any, Any, object]) -> AsyncGenerator[None]:
    """Tasks for the length of the block, by name. One that fails ends the block."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine, name=name) for name, coroutine in coroutines.items()]
        yield
        for task in running:
            task.cancel()
