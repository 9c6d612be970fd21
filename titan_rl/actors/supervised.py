"""Processes with an actor each, which a supervisor spawns and which end on every way out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from monarch.actor import this_proc

from titan_rl.actors.processes.process import ProcessActor, ProcessFiles, stderr_into
from titan_rl.actors.processes.remote_process import RemoteProcess, call
from titan_rl.actors.processes.supervisor import Supervisor
from titan_rl.calls.user_code import reason
from titan_rl.errors import ActorDiedError, TitanRLError

STOP_TIMEOUT_S = 30.0


class SupervisedProcesses:
    """Spawns processes and ends them.

    Args:
        supervisor: the `Supervisor` of the processes.
        start_timeout_s: longest wait for one to start.
    """

    def __init__(self, files: ProcessFiles, supervisor: Any, start_timeout_s: float) -> None:
        self._files = files
        self._supervisor = supervisor
        self._start_timeout_s = start_timeout_s
        self._remotes: dict[str, RemoteProcess] = {}  # by id, of those not known to have ended

    async def spawn(
        self, name: str, actor_class: type[ProcessActor], *arguments: Any, num_ranks: int = 1
    ) -> tuple[RemoteProcess, Any]:
        """A process, or a group of them, and the handle of its actor, which has started.

        Raises:
            ActorDiedError: it did not start in time.
        """
        remote = RemoteProcess(name, self._note_end)
        self._remotes[remote.id] = remote
        limit_s = self._start_timeout_s
        try:
            spawn = self._supervisor.spawn
            actor = await call(spawn, remote.id, actor_class, arguments, num_ranks, who="supervisor", timeout_s=limit_s)
            remote.watch(await remote.call_all(actor.pid, timeout_s=limit_s))
            await remote.call_all(actor.start, timeout_s=limit_s)
        except TitanRLError as error:
            remote.end(f"it did not start: {reason(error)}")
            raise
        return remote, actor

    def log_path(self, name: str) -> str:
        """Where the output of a process goes."""
        return str(self._files.logs / f"{name}.log")

    async def close(self) -> None:
        """End every process."""
        for remote in self._remotes.values():
            remote.close()
        self._disconnect()
        with contextlib.suppress(ActorDiedError):
            await call(self._supervisor.terminate, who="supervisor", timeout_s=STOP_TIMEOUT_S)

    def _disconnect(self) -> None:
        """Let go of what is held towards the processes, before they are ended."""

    def _note_end(self, remote: RemoteProcess) -> None:
        del self._remotes[remote.id]


class Startable(Protocol):
    """What `started` starts."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


P = TypeVar("P", bound=Startable)


@contextlib.asynccontextmanager
async def started(logs: Path, make: Callable[[Any], P]) -> AsyncGenerator[P]:
    """Started processes, which end with the block.

    Args:
        make: of the supervisor of the processes.

    Raises:
        ActorDiedError: a process did not start in time.
    """
    with stderr_into(logs / "monarch.log"):  # it greets its user there when it is first used
        processes = make(this_proc().spawn("supervisor", Supervisor))
    try:
        await processes.start()
        yield processes
    finally:
        await processes.close()
