"""Remote process as its callers see it: calls are answered while it lives, and all fail once it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from titan_rl.cluster.liveness.health_check import KernelWatcher, ProcessHealth, Watched, Watcher, hang_reason
from titan_rl.cluster.processes.roles import ProcessId
from titan_rl.core.errors import ActorDiedError

_numbers = count()


class NoAnswerError(ActorDiedError):
    """An actor did not answer within the time limit of the call; its process may live."""


class RemoteProcess:
    """A process, or several that are of no use without each other.

    Monarch tells of a process that died after some seconds, or half a minute if it was asking just then; the kernel
    tells at once of those on this host. Either way `end` settles it.

    Attributes:
        id: unlike the name it is never another's: that of a process which replaces this one differs.
        has_started: it was there, whatever became of it.
        reason: why it ended; None while it lives.
        excused: it ended because its host went, and not by what it was at.
        pids: on their hosts, of those that are watched.

    Args:
        name: for messages; the id of a process that has a role in a run.
        on_end: called once, from within `end`.
        hang_timeout_s: it ends when it gives no sign of life for so long.
    """

    def __init__(
        self,
        name: str | ProcessId,
        on_end: Callable[[RemoteProcess], None] | None = None,
        hang_timeout_s: float = math.inf,
    ) -> None:
        self.name = str(name)
        self._process = name if isinstance(name, ProcessId) else None
        self.id = f"{name}-{next(_numbers)}"
        self.has_started = False
        self.reason: str | None = None
        self.excused = False
        self._on_end = on_end
        self._calls: set[asyncio.Timeout] = set()
        self._hang_timeout_s = hang_timeout_s
        self.pids: tuple[int, ...] = ()
        self._watched: list[Watched] = []
        self._health: dict[int, ProcessHealth] = {}  # those of each of the processes, by its place among them

    @property
    def process(self) -> ProcessId:
        """Role and number of a process that has a role in a run."""
        assert self._process is not None, f"{self.name} has no role"
        return self._process

    def watch(self, pids: Sequence[int], watcher: Watcher | None = None) -> None:
        """Watch for the end of these processes, and for hangs. Without a watcher that can report them, Monarch has to.

        Args:
            watcher: of the host that they are on; by default this one's kernel, which tells of ends alone.
        """
        self.pids += tuple(pids)
        for pid in pids:
            try:
                watched = (watcher or KernelWatcher()).watch(pid, self.end, partial(self._note, len(self._watched)))
            except ProcessLookupError:
                self.end(f"process {pid} ended")
                return
            if watched is not None:
                self._watched.append(watched)

    def _note(self, place: int, health: ProcessHealth) -> None:
        self._health[place] = health
        if (reason := hang_reason(self._health.values(), self._hang_timeout_s)) is not None:
            self.end(reason)

    def end(self, reason: str, *, excused: bool = False) -> None:
        """Fail the calls in flight and all to come, and kill what is left of the watched processes. Doing it again does
        nothing.

        Args:
            reason: may be the text of an error that names the process already, which is told once.
            excused: its host goes, or is gone.
        """
        if self.reason is not None:
            return
        self.reason, self.excused = reason.replace(f"{self.name} died: ", ""), excused
        for watched in self._watched:
            watched.kill()
        self.close()
        for limit in self._calls:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
        if self._on_end is not None:
            self._on_end(self)

    def close(self) -> None:
        """Watch no longer: whatever ends now was told to."""
        while self._watched:
            self._watched.pop().close()

    async def call(self, endpoint: Any, *args: Any, timeout_s: float | None = None) -> Any:
        """Call an actor's endpoint and raise what the actor raised, rather than Monarch's wrapping of it.

        Raises:
            ActorDiedError: the process ended, or did not answer within `timeout_s` seconds.
        """
        return await self.until_end(lambda: endpoint.call_one(*args), timeout_s)

    async def call_all(self, endpoints: Sequence[Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call an endpoint of every rank at once, and return what each has answered.

        Raises:
            ActorDiedError: as `call`, of any of them.
        """
        return await asyncio.gather(*[self.call(endpoint, *args, timeout_s=timeout_s) for endpoint in endpoints])

    async def until_end(self, begin: Callable[[], Awaitable[Any]], timeout_s: float | None = None) -> Any:
        """Wait for an awaitable, or for the end of the process if that comes first.

        Raises:
            ActorDiedError: as `call`.
        """
        limit = asyncio.timeout(timeout_s)
        self._calls.add(limit)
        try:
            async with limit:
                if self.reason is None:
                    return await begin()
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
    """Call an endpoint of a process that is not watched; see `RemoteProcess.call`."""
    return await RemoteProcess(who).call(endpoint, *args, timeout_s=timeout_s)


def last_line(report: str) -> str:
    """The line of a Monarch failure report that says what happened."""
    return next((line.strip() for line in reversed(report.splitlines()) if line.strip()), "no reason given")
