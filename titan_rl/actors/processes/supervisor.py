"""The actor that spawns every other one, and so decides what the death of one means."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass
from typing import Any

import monarch.actor
from monarch.actor import Actor, MeshFailure, concurrent_endpoint, this_host
from monarch.spmd import setup_torch_elastic_env_async

from titan_rl.actors.processes.remote_process import last_line

logger = logging.getLogger(__name__)

LOCAL_HOST = "127.0.0.1"
STOP_TIMEOUT_S = 20.0


def _log_fault(failure: MeshFailure) -> None:
    logger.warning("monarch: %s", failure)


# A message that races the death of its receiver is reported twice: to the call, which fails, and to the root client,
# whose default is to end the whole process. The call's owner decides.
monarch.actor.unhandled_fault_hook = _log_fault


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """Monarch found that the process spawned as `process_id` ended, or its actor did, without being told to."""

    process_id: str
    reason: str


class Supervisor(Actor):
    """Lives in the controller's process. A child that dies ends no one else: its death is reported by `next_failure`,
    and calls in flight to it fail. Processes go by the ids of their remotes."""

    def __init__(self) -> None:
        self._processes: dict[str, Any] = {}  # id -> ProcMesh
        self._failures: asyncio.Queue[ProcessFailure] = asyncio.Queue()

    def __supervise__(self, failure: MeshFailure) -> bool:
        process_id = failure.mesh_name.rsplit("-", 1)[0]  # Monarch appends a random suffix
        if process_id in self._processes:
            self._failures.put_nowait(ProcessFailure(process_id, last_line(str(failure))))
        return True

    @concurrent_endpoint
    async def spawn(self, process_id: str, actor_class: type[Actor], args: tuple[Any, ...], num_ranks: int = 1) -> Any:
        """Start a process that holds one actor, or as many as have ranks in one torch.distributed world.

        Returns:
            the actor's handle, with the dimension "procs".
        """
        processes = this_host().spawn_procs({"procs": num_ranks}, name=process_id)
        self._processes[process_id] = processes
        if num_ranks > 1:
            await setup_torch_elastic_env_async(processes, LOCAL_HOST, _free_port())
        return processes.spawn(process_id, actor_class, *args)

    @concurrent_endpoint
    async def next_failure(self) -> ProcessFailure:
        """One process may be reported more than once."""
        return await self._failures.get()

    @concurrent_endpoint
    async def terminate(self, peer_ids: tuple[str, ...] | None = None) -> None:
        """End these processes, or all. One that is dead already is no error."""
        chosen = [self._processes.pop(process_id, None) for process_id in peer_ids or tuple(self._processes)]
        async with asyncio.TaskGroup() as stops:
            for process in chosen:
                if process is not None:
                    stops.create_task(_stop(process))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOCAL_HOST, 0))
        return listener.getsockname()[1]


async def _stop(process: Any) -> None:
    with contextlib.suppress(Exception):  # a dead process cannot be stopped twice
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.stop()
