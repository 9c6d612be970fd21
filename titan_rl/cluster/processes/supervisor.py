"""The actor that spawns every other one, and so decides what the death of one means."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import monarch.actor
from monarch.actor import (
    Actor,
    HostMesh,
    MeshFailure,
    ProcMesh,
    attach_to_workers,
    concurrent_endpoint,
    default_bootstrap_cmd,
    this_host,
)

from titan_rl.cluster.processes.answers import ActorHandle, AnsweringActor
from titan_rl.cluster.processes.remote_process import last_line

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class _Spawned:
    host: str | None  # by which it is attached; None is this machine
    process: ProcMesh


class Supervisor(Actor):
    """Lives in the controller's process. A child that dies ends no one else: its death is reported by `next_failure`,
    and calls in flight to it fail. Processes go by the ids of their remotes, of which those of a group have the same.
    """

    def __init__(self) -> None:
        self._hosts: dict[str, HostMesh] = {}
        self._processes: dict[str, list[_Spawned]] = {}  # by their ids
        self._stops: dict[asyncio.Task[None], str | None] = {}  # under way, and of which host
        self._ids: dict[str, str] = {}  # by Monarch's names of the processes
        self._failures: asyncio.Queue[ProcessFailure] = asyncio.Queue()

    def __supervise__(self, failure: MeshFailure) -> bool:
        name = failure.mesh_name.rsplit("-", 1)[0]  # Monarch appends a random suffix
        if name in self._ids:
            self._failures.put_nowait(ProcessFailure(self._ids[name], last_line(str(failure))))
        return True

    @concurrent_endpoint
    async def attach(self, host: str, worker: str) -> None:
        """Have processes be spawned under this name by the Monarch of another machine, `tcp://HOST:PORT`. Of an address
        whose host was lost Monarch delivers nothing any more, whoever listens there."""
        self._hosts[host] = attach_to_workers(ca="trust_all_connections", workers=[worker])

    @concurrent_endpoint
    async def detach(self, host: str) -> None:
        """Go on without a machine. What it still has is not ended, nor waited for: one that is gone cannot say that
        its processes have ended."""
        self._hosts.pop(host, None)
        for process_id, spawned in self._processes.items():
            self._processes[process_id] = [process for process in spawned if process.host != host]
        for stop, its_host in self._stops.items():
            if its_host == host:
                stop.cancel()

    @concurrent_endpoint
    async def spawn(
        self,
        process_id: str,
        actor_class: type[Actor],
        args: tuple[Any, ...],
        rank: int = 0,
        host: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Any:
        """Start a process that holds one actor.

        Args:
            rank: its number among the processes of this id.
            host: the name of one that is attached; by default this machine.
            environment: variables of the process, beside those of its host.

        Returns:
            the actor's handle; that of an `AnsweringActor` is an `ActorHandle`.
        """
        name = f"{process_id}-rank{rank}" if rank else process_id
        command = default_bootstrap_cmd().with_env(dict(environment)) if environment else None
        mesh = this_host() if host is None else self._hosts[host]
        processes = mesh.spawn_procs({"procs": 1}, name=name, bootstrap_command=command)
        self._processes.setdefault(process_id, []).append(_Spawned(host, processes))
        self._ids[name] = process_id
        await processes.initialized  # else the answer blocks this actor until the host has spoken, and one may be gone
        actor = processes.spawn(name, actor_class, *args)
        await actor.initialized
        return ActorHandle(actor) if issubclass(actor_class, AnsweringActor) else actor

    @concurrent_endpoint
    async def next_failure(self) -> ProcessFailure:
        """One process may be reported more than once."""
        return await self._failures.get()

    @concurrent_endpoint
    async def terminate(self, process_ids: tuple[str, ...] | None = None) -> None:
        """End these processes, or all. One that is dead already is no error."""
        chosen = tuple(self._processes) if process_ids is None else process_ids
        async with asyncio.TaskGroup() as stops:
            for process_id in chosen:
                self._ids = {name: id for name, id in self._ids.items() if id != process_id}
                for spawned in self._processes.pop(process_id, ()):
                    stop = stops.create_task(_stop(spawned.process))
                    self._stops[stop] = spawned.host
                    stop.add_done_callback(self._stops.pop)


async def _stop(process: Any) -> None:
    with contextlib.suppress(Exception):  # a dead process cannot be stopped twice
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.stop()
