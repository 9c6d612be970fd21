"""What the processes of another host say, brought into the run's folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from titan_rl.cluster.hosts.host import Host
from titan_rl.cluster.hosts.written_files import Piece
from titan_rl.core.errors import ActorDiedError

INTERVAL_S = 0.5
TIMEOUT_S = 10.0  # longest wait for an answer
REST_S = 60.0
"""Longest time for what is left at the end, over a slow link say: something there may go on writing."""


class HostOutput:
    """Logs and traces of a host, as they grow. What keeps them there or off the disk here costs them, and not the run.

    Args:
        run_dir: of the run, on this machine.
        tell: called once with why something cannot be read there or written here.
    """

    def __init__(self, host: Host, run_dir: Path, tell: Callable[[str], object]) -> None:
        self._host = host
        self._run_dir = run_dir
        self._tell = tell
        self._had: dict[str, tuple[int, int]] = {}  # which files have arrived, and how many bytes
        self._begins: dict[str, int] = {}  # of each, behind what a process of the same name wrote on another host
        self._failed = False

    async def collect(self) -> None:
        """While the run goes on, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            with contextlib.suppress(ActorDiedError):  # it may answer later; one that is gone is detached
                await self._take()

    async def take_rest(self) -> None:
        """Nothing more where the host is gone."""
        with contextlib.suppress(ActorDiedError, TimeoutError):
            async with asyncio.timeout(REST_S):
                while await self._take():
                    pass

    async def _take(self) -> bool:
        """Whether something came."""
        try:
            pieces: list[Piece] = await self._host.link.call(
                self._host.agent.new_output, self._had, timeout_s=TIMEOUT_S
            )
            for piece in pieces:
                self._append(piece)
        except OSError as error:
            if not self._failed:
                self._tell(f"what host {self._host.name} says is not written here for now: {error}")
            self._failed = True
            return False
        return bool(pieces)

    def _append(self, piece: Piece) -> None:
        """All of it or nothing. What was in the place of a file that begins anew goes."""
        path = self._run_dir / piece.name
        path.parent.mkdir(exist_ok=True)
        with path.open("ab", buffering=0) as file:
            begin = self._begins.setdefault(piece.name, file.tell())
            if not piece.begin:
                file.truncate(begin)
            size = file.seek(0, os.SEEK_END)
            try:
                rest = memoryview(piece.data)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise
        self._had[piece.name] = piece.file, piece.begin + len(piece.data)
