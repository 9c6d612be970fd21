"""A worker on each of several hosts, for as long as a run: where one fails, another is started in its place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.cluster.providers.worker_process import WorkerProcess
from titan_rl.core.errors import ProviderError

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 5.0
MOST_WAIT_S = 60.0
"""Between two workers of a host that does not get one: each wait is twice the one before."""


@dataclass(slots=True)
class _Kept:
    """One host.

    Attributes:
        tried: set once its worker listens, or has failed.
        address: where its worker listens now.
        listens_since: by the event loop's clock; None before it does.
        problem: why none does; "" before that is known.
    """

    words: Sequence[str]
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    address: str | None = None
    listens_since: float | None = None
    problem: str = ""
    keeping: asyncio.Task[None] = field(init=False)


class KeptWorkers:
    """The `ChangingWorkers` of commands that run a worker each, and end with it. Made by `kept_workers`.

    A worker that is told to end, by SIGTERM, does so in order, and stays away: whoever told it wants its host. Any
    other end is a failure, of the worker, of its host or of the way there, and the command is run again after a while.

    Args:
        logs: a folder for what workers say, a file for each host.
        tell: shows a person whose worker ends, and whose listens again.
        first_wait_s, most_wait_s: from a failure to the next command, which doubles from the one to the other.
    """

    def __init__(
        self,
        logs: Path,
        tell: Callable[[str], object],
        *,
        first_wait_s: float = FIRST_WAIT_S,
        most_wait_s: float = MOST_WAIT_S,
    ) -> None:
        self._logs = logs
        self._tell = tell
        self._first_wait_s = first_wait_s
        self._most_wait_s = most_wait_s
        self._kept: dict[str, _Kept] = {}  # by host
        self._ending: set[asyncio.Task[None]] = set()
        self._began_with: Sequence[str] = ()

    def __iter__(self) -> Iterator[str]:
        """The addresses that the run begins with, in the order of the hosts."""
        return iter(self._began_with)

    @property
    def hosts(self) -> Set[str]:
        return self._kept.keys()

    def address_of(self, host: str) -> str | None:
        """Where its worker listens now."""
        return self._kept[host].address

    async def current(self) -> Collection[str]:
        return [kept.address for kept in self._kept.values() if kept.address is not None]

    def keep(self, host: str, words: Sequence[str]) -> None:
        """From now on this command is to run a worker there."""
        kept = self._kept[host] = _Kept(words)
        kept.keeping = asyncio.create_task(self._keep(host, kept), name=f"worker on {host}")

    def let_go(self, hosts: Iterable[str]) -> None:
        """Start no others on these hosts. Those that are there are told to end, which may take a while."""
        for host in [*hosts]:
            keeping = self._kept.pop(host).keeping
            keeping.cancel()
            self._ending.add(keeping)
            keeping.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Returns once all have ended."""
        self.let_go(self.hosts)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def begin(self, wait_s: float) -> None:
        """Wait until each host has a worker that listens, or has had one that failed; the run begins without the
        latter.

        Raises:
            ProviderError: there is no other.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                for kept in self._kept.values():
                    await kept.tried.wait()
        self._began_with = [*await self.current()]
        problems = {
            host: kept.problem or f"no worker listens on {host} after {wait_s:g} s; see {self._log_of(host)}"
            for host, kept in self._kept.items()
            if kept.address is None
        }
        if not self._began_with:
            raise ProviderError("; ".join(problems.values()) or "there is no host")
        for host, problem in problems.items():
            self._tell(f"the run begins without {host}, which is asked again: {problem}")

    async def _keep(self, host: str, kept: _Kept) -> None:
        clock, wait_s, told = asyncio.get_running_loop().time, self._first_wait_s, ""
        while True:
            kept.listens_since = None
            ended = await self._run(host, kept)
            if ended is None:
                self._tell(f"the worker on {host} has ended as it was told to, and is not started again")
                return
            is_first, kept.problem = not kept.tried.is_set(), ended
            kept.tried.set()
            if kept.listens_since is not None and clock() - kept.listens_since >= self._most_wait_s:
                wait_s, told = self._first_wait_s, ""
            logger.info("%s; another is started in %g s", ended, wait_s)
            if not is_first and told != ended:  # the first is told by `begin`
                self._tell(f"{ended}; another is started as soon as that can be")
            told = ended
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._most_wait_s)

    async def _run(self, host: str, kept: _Kept) -> str | None:
        """How a worker failed; None where it was told to end."""
        worker = WorkerProcess(host, kept.words, self._log_of(host), self._tell)
        try:
            await worker.start()
        except ProviderError as error:
            return str(error)
        try:
            kept.address = await worker.address()
            kept.listens_since = asyncio.get_running_loop().time()
            if kept.problem:
                self._tell(f"a worker listens on {host} again")
            kept.tried.set()
            ended = await worker.ended()
            return None if worker.was_told_to else ended
        except ProviderError as error:
            return str(error)
        finally:
            kept.address = None
            await worker.end()

    def _log_of(self, host: str) -> Path:
        plain = re.sub(r"[^\w.@-]", "_", host)
        return self._logs / f"worker-{plain}.log"


@contextlib.asynccontextmanager
async def kept_workers(
    commands: Sequence[tuple[str, Sequence[str]]], logs: Path, tell: Callable[[str], object], wait_s: float
) -> AsyncGenerator[KeptWorkers]:
    """Run (host, command) of each. All have ended behind the block.

    Raises:
        ProviderError: none listens in time.
    """
    workers = KeptWorkers(logs, tell)
    try:
        for host, words in commands:
            workers.keep(host, words)
        await workers.begin(wait_s)
        yield workers
    finally:
        await asyncio.shield(workers.close())
