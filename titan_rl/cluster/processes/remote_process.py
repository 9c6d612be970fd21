"""Handle of a remote process. Its calls fail once the process has ended."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from titan_rl.cluster.liveness.health_check import HEALTHY, ProcessHealth, ProcessorTime, Watcher, hang_reason
from titan_rl.cluster.processes.roles import ProcessId
from titan_rl.core.errors import ActorDiedError

_numbers = count()


class NoAnswerError(ActorDiedError):
    """An actor did not answer within the time limit of the call; its process may live."""


class ProcessOwner(Protocol):
    """Receiver of the ends of remote processes."""

    def process_ended(self, remote: RemoteProcess) -> None:
        """Handle the end of a process. Called once, from within `RemoteProcess.end`."""
        ...

    def process_held(self, remote: RemoteProcess, what: str) -> None:
        """Handle the finding that a call holds the GIL of a process."""
        ...


@dataclass(slots=True)
class _Rank:
    """Watched process of a `RemoteProcess`, and observer of its watch."""

    remote: RemoteProcess
    pid: int
    watcher: Watcher
    health: ProcessHealth = HEALTHY

    @property
    def processor_time(self) -> ProcessorTime:
        return ProcessorTime(self.health.processor_s, self.health.work_s)

    def ended(self, how: str) -> None:
        self.remote.end(how)

    def checked(self, health: ProcessHealth) -> None:
        if health.held and not self.health.held:
            self.remote.note_held(health.held)
        self.health = health
        self.remote.end_if_hanging()


class RemoteProcess:
    """Process, or group of processes that cannot work without each other.

    Monarch reports the death of a process after several seconds, or after half a minute if it had just polled. The
    kernel reports deaths on this host at once. The first report calls `end`.

    Attributes:
        id: Unique id, also among processes of the same name that replace each other.
        has_started: Whether its start succeeded.
        reason: Reason for its end; None while it lives.
        ended: Event that is set at its end.
        excused: Whether it ended because its host was drained or lost, and not by its own fault.
        pids: Pids of the watched processes on their hosts.
        hosts: Names of its hosts.

    Args:
        name: Name for messages, or the id of a process that has a role in a run.
        owner: Notified of the end of the process.
        hang_timeout_s: Time without a sign of life after which the process is ended, in seconds.
    """

    def __init__(
        self,
        name: str | ProcessId,
        owner: ProcessOwner | None = None,
        hang_timeout_s: float = math.inf,
        hosts: Iterable[str] = (),
    ) -> None:
        self.name = str(name)
        self._process = name if isinstance(name, ProcessId) else None
        self.id = f"{name}-{next(_numbers)}"
        self.has_started = False
        self.reason: str | None = None
        self.excused = False
        self.ended = asyncio.Event()
        self._owner = owner
        self._calls: set[asyncio.Timeout] = set()
        self._hang_timeout_s = hang_timeout_s
        self.pids: tuple[int, ...] = ()
        self.hosts = frozenset(hosts)
        self._ranks: list[_Rank] = []
        self._closed_ranks_time = ProcessorTime()

    @property
    def processor_time(self) -> ProcessorTime:
        """Processor time so far, according to the last health checks."""
        return sum((rank.processor_time for rank in self._ranks), self._closed_ranks_time)

    @property
    def process(self) -> ProcessId:
        """Role and number of a process that has a role in a run."""
        assert self._process is not None, f"{self.name} has no role"
        return self._process

    def watch(self, pids: Sequence[int], watcher: Watcher) -> None:
        """Watch these processes for their end and for hangs. If the watcher of their host cannot report ends, only
        Monarch does."""
        self.pids += tuple(pids)
        for pid in pids:
            rank = _Rank(self, pid, watcher)
            try:
                watcher.watch(pid, rank)
            except ProcessLookupError:
                self.end(f"process {pid} ended")
                return
            self._ranks.append(rank)

    def note_held(self, what: str) -> None:
        if self._owner is not None:
            self._owner.process_held(self, what)

    def end_if_hanging(self) -> None:
        """End the process if the health of its ranks shows that it hangs."""
        if (reason := hang_reason([rank.health for rank in self._ranks], self._hang_timeout_s)) is not None:
            self.end(reason)

    def end(self, reason: str, *, excused: bool = False) -> None:
        """Fail the calls in flight and all later ones, and kill the watched processes that still run. Does nothing if
        the process has already ended.

        Args:
            reason: Reason for the end. May be the text of an error that begins with the name of the process.
            excused: Whether the cause is that its host was drained or lost.
        """
        if self.reason is not None:
            return
        self.reason, self.excused = reason.replace(f"{self.name} died: ", ""), excused
        self.kill()
        self.ended.set()
        for limit in self._calls:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
        if self._owner is not None:
            self._owner.process_ended(self)

    def kill(self) -> None:
        """Kill the watched processes that still run. This is an intended end: they have released all shared
        resources."""
        for rank in self._ranks:
            rank.watcher.kill(rank.pid)
        self.close()

    def close(self) -> None:
        """Stop watching. Ends from now on are intended."""
        while self._ranks:
            rank = self._ranks.pop()
            rank.watcher.forget(rank.pid)
            self._closed_ranks_time += rank.processor_time

    async def call(self, endpoint: Any, *args: Any, timeout_s: float | None = None) -> Any:
        """Call an actor's endpoint. Raises the actor's own error instead of Monarch's wrapper of it.

        Raises:
            ActorDiedError: The process ended, or did not answer within `timeout_s` seconds.
        """
        async with self.alive(timeout_s):
            return await endpoint.call_one(*args)

    async def call_all(self, endpoints: Sequence[Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call an endpoint of every rank at once, and return the answers.

        Raises:
            ActorDiedError: See `call`.
        """
        return await asyncio.gather(*[self.call(endpoint, *args, timeout_s=timeout_s) for endpoint in endpoints])

    @contextlib.asynccontextmanager
    async def alive(self, timeout_s: float | None = None) -> AsyncGenerator[None]:
        """Context manager whose block is interrupted when the process ends. Raises at once if it has already ended.

        Raises:
            ActorDiedError: See `call`.
        """
        if self.reason is not None:
            raise self._died(self.reason)
        limit = asyncio.timeout(timeout_s)
        self._calls.add(limit)
        try:
            async with limit:
                yield
            return
        except ActorError as error:
            raise error.exception from None
        except SupervisionError as error:
            raise self._died(self.reason or last_line(str(error))) from None
        except TimeoutError:
            if self.reason is None:
                raise NoAnswerError(f"{self.name} did not answer within {timeout_s:g} s") from None
        finally:
            self._calls.discard(limit)
        raise self._died(str(self.reason))

    def _died(self, why: str) -> ActorDiedError:
        return ActorDiedError(f"{self.name} died: {why}", excused=self.excused)


async def call(endpoint: Any, *args: Any, who: str, timeout_s: float | None = None) -> Any:
    """Call an endpoint of a process that has no handle; see `RemoteProcess.call`."""
    return await RemoteProcess(who).call(endpoint, *args, timeout_s=timeout_s)


def last_line(report: str) -> str:
    """Last line of a Monarch failure report, which has the cause."""
    return next((line.strip() for line in reversed(report.splitlines()) if line.strip()), "no reason given")
