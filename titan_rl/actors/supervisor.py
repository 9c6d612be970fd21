"""The actor that spawns every other one, and so decides what the death of one means."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import monarch.actor
from monarch.actor import Actor, MeshFailure, concurrent_endpoint, this_host

from titan_rl.actors.process import last_line

logger = logging.getLogger(__name__)


def _log_fault(failure: MeshFailure) -> None:
    logger.warning("monarch: %s", failure)


# A message that races the death of its receiver is reported twice: to the call, which fails, and to the root client,
# whose default is to end the whole process. The call's owner decides.
monarch.actor.unhandled_fault_hook = _log_fault


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """The process `name` ended without being told to."""

    name: str
    reason: str


class Supervisor(Actor):
    """Lives in the controller's process. A child that dies ends no one else: its death is reported by `next_failure`,
    and calls in flight to it fail."""

    def __init__(self) -> None:
        self._processes: dict[str, Any] = {}  # name -> ProcMesh
        self._failures: asyncio.Queue[ProcessFailure] = asyncio.Queue()

    def __supervise__(self, failure: MeshFailure) -> bool:
        name = failure.mesh_name.rsplit("-", 1)[0]  # Monarch appends a random suffix
        if self._processes.pop(name, None) is not None:
            self._failures.put_nowait(ProcessFailure(name, last_line(str(failure))))
        return True

    @concurrent_endpoint
    async def spawn(self, name: str, actor_class: type[Actor], args: tuple[Any, ...]) -> Any:
        """Start a process that holds one actor.

        Returns:
            the actor's handle.
        """
        process = this_host().spawn_procs({"procs": 1}, name=name)
        self._processes[name] = process
        return process.spawn(name, actor_class, *args)

    @concurrent_endpoint
    async def next_failure(self) -> ProcessFailure:
        return await self._failures.get()

    @concurrent_endpoint
    async def replace(self, name: str, reason: str) -> None:
        """End a process that is of no more use, and report it as one that died."""
        if (process := self._processes.pop(name, None)) is not None:
            await _stop(process)
            self._failures.put_nowait(ProcessFailure(name, reason))

    @concurrent_endpoint
    async def terminate(self, names: tuple[str, ...] | None = None) -> None:
        """End these processes, or all. One that is dead already is no error."""
        chosen = [self._processes.pop(name, None) for name in names or tuple(self._processes)]
        async with asyncio.TaskGroup() as stops:
            for process in chosen:
                if process is not None:
                    stops.create_task(_stop(process))


async def _stop(process: Any) -> None:
    with contextlib.suppress(Exception):  # a dead process cannot be stopped twice
        await process.stop()
