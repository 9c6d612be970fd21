"""A command of this host that runs a worker on another one: what it says, and that it ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from titan_rl.core.errors import ProviderError

LISTENS = re.compile(rb"listening on (\S+)\s")
KEPT = 4096
"""Bytes of what a worker has said last."""

END_S = 20.0
"""For a worker that is told to end; a run's processes there have ended before."""

SSH_FAILED = 255
"""What ssh ends with by itself; else with what the worker did."""

_TETHERED = 'exec 3<&0 </dev/null; (cat <&3; kill -TERM $$) >/dev/null 2>&1 & exec 3<&-; exec "$@"'


def tethered(words: Sequence[str], folder: str | None = None) -> list[str]:
    """The command, told to end when its standard input does: when who started it closes that, or is no more.

    Args:
        folder: to begin in, if it is there.
    """
    there = "" if folder is None else f"cd {shlex.quote(folder)} 2>/dev/null; "
    return ["sh", "-c", f"{there}{_TETHERED}", "sh", *words]


class WorkerProcess:
    """A command that is started, and says where its worker listens.

    Args:
        host: for messages.
        log: a file for all that it says.
        tell: shows a person that the worker does not end though it should.
    """

    def __init__(self, host: str, words: Sequence[str], log: Path, tell: Callable[[str], object]) -> None:
        self.host = host
        self._words = words
        self.log = log
        self._tell = tell
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
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )
        except OSError as error:
            raise ProviderError(f"{self._words[0]} cannot be started: {error.strerror}") from None
        self._following = asyncio.create_task(self._follow(), name=f"worker on {self.host}")

    async def address(self) -> str:
        """Where the worker listens, once it does.

        Raises:
            ProviderError: it has ended instead.
        """
        return await asyncio.shield(self._address)

    async def ended(self) -> str:
        """Returns once the command has ended: how it did, with its last words."""
        return await asyncio.shield(self._following)

    @property
    def was_told_to(self) -> bool:
        """It has ended in order, after SIGTERM, as `titan-rl worker` does."""
        return self._process.returncode == 128 + signal.SIGTERM

    async def end(self) -> None:
        """Have the worker end, and wait for that. One that does not is left to its host: the command is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._tell(f"the worker on {self.host} has not ended in {END_S:g} s; see {self.log}")
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._following

    async def _follow(self) -> str:
        assert self._process.stdout is not None
        recent = b""
        with self.log.open("ab", buffering=0) as log:
            while said := await self._process.stdout.read(1 << 16):
                log.write(said)
                recent += said
                if not self._address.done() and (listens := LISTENS.search(recent)):
                    self._address.set_result(listens[1].decode())
                recent = recent[-KEPT:]
        code = await self._process.wait()
        last = recent.decode(errors="replace").strip().rpartition("\n")[2] or "it said nothing"
        ended = f"the worker on {self.host} has ended with code {code}: {last}"
        if self._address.done() and code == SSH_FAILED and Path(self._words[0]).name == "ssh":
            where = f"{self.host}, of the worker at {self._address.result()},"  # by which `titan-rl hosts` has it
            ended = f"ssh's connection to {where} has ended; see {self.log}"
        if not self._address.done():
            self._address.set_exception(ProviderError(f"{ended}; its log: {self.log}"))
            self._address.exception()  # whoever waits hears of it; nobody need
        return ended
