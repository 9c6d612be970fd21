"""Worker commands of a provider: one per host, restarted with backoff when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shlex
import signal
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.core.calls.retries import Backoff
from titan_rl.core.console import Console
from titan_rl.core.errors import ProviderError

LISTENS = re.compile(rb"listening on (\S+)\s")
KEPT = 4096
"""Number of bytes of a worker's latest output that are kept."""

END_S = 20.0
"""Longest wait for the end of a worker, in seconds. The processes of a run end before their worker."""

SSH_FAILED = 255
"""Exit code of ssh for its own failures; otherwise it exits with the code of the remote command."""

_TETHERED = 'exec 3<&0 </dev/null; (cat <&3; kill -TERM $$) >/dev/null 2>&1 & exec 3<&-; exec "$@"'


def tethered(words: Sequence[str], folder: str | None = None) -> list[str]:
    """Wrap a command so that it ends when its standard input closes: when its starter closes it or dies.

    Args:
        folder: Working directory, if it exists there.
    """
    change_folder = "" if folder is None else f"cd {shlex.quote(folder)} 2>/dev/null; "
    return ["sh", "-c", f"{change_folder}{_TETHERED}", "sh", *words]


class WorkerProcess:
    """Command that runs a worker and prints the address where the worker listens.

    Args:
        host: Name of the host, for messages.
        log: File for all of its output.
        console: Warns the user if the worker does not end when it should.
    """

    def __init__(self, host: str, words: Sequence[str], log: Path, console: Console) -> None:
        self.host = host
        self._words = words
        self.log = log
        self._console = console
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process
        self._following: asyncio.Task[str]

    async def start(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
            )
        except OSError as error:
            raise ProviderError(f"{self._words[0]} cannot be started: {error.strerror}") from None
        self._following = asyncio.create_task(self._follow(), name=f"worker on {self.host}")

    async def address(self) -> str:
        """Wait until the worker listens, and return its address.

        Raises:
            ProviderError: The worker ended before it listened.
        """
        return await asyncio.shield(self._address)

    async def ended(self) -> str:
        """Wait for the end of the command, and return a description with its last line."""
        return await asyncio.shield(self._following)

    @property
    def ended_on_request(self) -> bool:
        """Whether it ended gracefully after SIGTERM, as `titan-rl worker` does."""
        return self._process.returncode == 128 + signal.SIGTERM

    async def end(self) -> None:
        """Have the worker end, and wait for that. If it does not end in time, the local command is killed, and the
        worker is left to its host."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._console.warning(f"the worker on {self.host} has not ended in {END_S:g} s; see {self.log}")
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._following

    async def _follow(self) -> str:
        assert self._process.stdout is not None
        recent = b""
        with self.log.open("ab", buffering=0) as log:
            while output := await self._process.stdout.read(1 << 16):
                log.write(output)
                recent += output
                if not self._address.done() and (listens := LISTENS.search(recent)):
                    self._address.set_result(listens[1].decode())
                recent = recent[-KEPT:]
        code = await self._process.wait()
        last = recent.decode(errors="replace").strip().rpartition("\n")[2] or "it printed nothing"
        ended = f"the worker on {self.host} has ended with code {code}: {last}"
        if self._address.done() and code == SSH_FAILED and Path(self._words[0]).name == "ssh":
            where = f"{self.host}, of the worker at {self._address.result()},"  # as `titan-rl hosts` shows it
            ended = f"ssh's connection to {where} has ended; see {self.log}"
        if not self._address.done():
            self._address.set_exception(ProviderError(f"{ended}; its log: {self.log}"))
            self._address.exception()  # marks it as retrieved, because nobody may wait for it
        return ended


logger = logging.getLogger(__name__)

FIRST_WAIT_S = 5.0
MOST_WAIT_S = 60.0
"""First and longest pause before a failed worker is started again, in seconds; see `Backoff`."""


@dataclass(slots=True)
class _Kept:
    """State of the worker of one host.

    Attributes:
        tried: Event that is set once its worker listens or has failed.
        address: Address where its worker listens now; None while none listens.
        listens_since: Time of the event loop's clock at which its latest worker began to listen; None if it has not.
        problem: Reason of its latest failure; "" before the first.
    """

    words: Sequence[str]
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    address: str | None = None
    listens_since: float | None = None
    problem: str = ""
    keeping: asyncio.Task[None] = field(init=False)


class KeptWorkers:
    """The `ChangingWorkers` of commands that run one worker each and end with it. Made by `kept_workers`.

    A worker that receives SIGTERM ends gracefully and is not restarted, because the sender wants its host. Any other
    end counts as a failure of the worker, the host or the connection, and the command is started again after a pause.

    Args:
        logs: Folder with a file for the output of each host's worker.
        console: Shows the user which workers end, and which listen again.
    """

    def __init__(self, logs: Path, console: Console) -> None:
        self._logs = logs
        self._console = console
        self._kept: dict[str, _Kept] = {}  # by host
        self._ending: set[asyncio.Task[None]] = set()
        self._began_with: Sequence[str] = ()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the addresses that the run starts with, in the order of the hosts."""
        return iter(self._began_with)

    @property
    def hosts(self) -> Set[str]:
        return self._kept.keys()

    def address_of(self, host: str) -> str | None:
        """Address at which the worker of a host listens now; None while none listens."""
        return self._kept[host].address

    async def current(self) -> Collection[str]:
        return [kept.address for kept in self._kept.values() if kept.address is not None]

    def keep(self, host: str, words: Sequence[str]) -> None:
        """Keep a worker running on a host with this command."""
        kept = self._kept[host] = _Kept(words)
        kept.keeping = asyncio.create_task(self._keep(host, kept), name=f"worker on {host}")

    def release(self, hosts: Iterable[str]) -> None:
        """Stop keeping workers on these hosts. The current ones are asked to end, which may take a while."""
        for host in [*hosts]:
            keeping = self._kept.pop(host).keeping
            keeping.cancel()
            self._ending.add(keeping)
            keeping.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all workers, and wait until they have ended."""
        self.release(self.hosts)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def begin(self, wait_s: float) -> None:
        """Wait until the worker of each host listens or has failed. The run starts without the hosts whose worker
        failed.

        Raises:
            ProviderError: No worker listens.
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
            self._console.warning(f"the run starts without {host}, and will try it again: {problem}")

    async def _keep(self, host: str, kept: _Kept) -> None:
        clock, backoff, reported = asyncio.get_running_loop().time, Backoff(FIRST_WAIT_S, MOST_WAIT_S), ""
        while True:
            kept.listens_since = None
            ended = await self._run(host, kept)
            if ended is None:
                self._console.warning(f"the worker on {host} has ended as requested, and is not restarted")
                return
            is_first, kept.problem = not kept.tried.is_set(), ended
            kept.tried.set()
            if kept.listens_since is not None and clock() - kept.listens_since >= MOST_WAIT_S:
                backoff, reported = Backoff(FIRST_WAIT_S, MOST_WAIT_S), ""
            logger.info("%s; another is started in %g s", ended, backoff.next_s)
            if not is_first and reported != ended:  # `begin` reports the first failure
                self._console.warning(f"{ended}; another is started as soon as possible")
            reported = ended
            await backoff.pause()

    async def _run(self, host: str, kept: _Kept) -> str | None:
        """Run a worker until it ends. Returns the reason of its failure; None if it was asked to end."""
        worker = WorkerProcess(host, kept.words, self._log_of(host), self._console)
        try:
            await worker.start()
        except ProviderError as error:
            return str(error)
        try:
            kept.address = await worker.address()
            kept.listens_since = asyncio.get_running_loop().time()
            if kept.problem:
                self._console.warning(f"a worker listens on {host} again")
            kept.tried.set()
            ended = await worker.ended()
            return None if worker.ended_on_request else ended
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
    commands: Sequence[tuple[str, Sequence[str]]], logs: Path, console: Console, wait_s: float
) -> AsyncGenerator[KeptWorkers]:
    """Context manager: run a command on each host, given as (host, command). All have ended after the block.

    Raises:
        ProviderError: No worker listens within `wait_s` seconds.
    """
    workers = KeptWorkers(logs, console)
    try:
        for host, words in commands:
            workers.keep(host, words)
        await workers.begin(wait_s)
        yield workers
    finally:
        await asyncio.shield(workers.close())
