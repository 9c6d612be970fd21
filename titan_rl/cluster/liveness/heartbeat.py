"""Heartbeats from a host to the controller: the messages, the silence timer, and the watchdog on the host that sends
them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.cluster.liveness.health_check import LOOK_S, HostWatch, Signs


class Contact:
    """Adds up for how long nothing has come from the other end.

    Time counts by looks, each of them for `longest_look_s` at most: where the looker itself was stopped or starved,
    what has come meanwhile is still to be read, and nobody has been silent.

    Example: of a host that may be silent for 3 s, looked at four times a second:

        contact = Contact(limit_s=3.0, longest_look_s=0.5, now=clock())
        contact.heard()
        contact.look(clock())  # False: it is there
    """

    def __init__(self, limit_s: float, longest_look_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._longest_look_s = longest_look_s
        self._looked_at = now
        self.silent_s = 0.0
        self._longest_s = 0.0

    def heard(self) -> None:
        self.silent_s = 0.0

    def look(self, now: float) -> bool:
        """Whether it is lost."""
        self.silent_s += min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
        self._longest_s = max(self._longest_s, self.silent_s)
        return self.silent_s >= self._limit_s

    def take_longest(self) -> float:
        """The longest silence, in seconds, since this was last called, by another thread if need be."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """Of the processes of one host. It is sent several times a second, and so is the sign that the host is there.

    Args:
        number: counts up. The answer has it.
        ended: how processes ended, by pid, until the controller has said that it knows.
        signs: of those that give none, by pid.
        leaving: why the host is about to go, and is to be drained; empty while it stays.
    """

    number: int
    ended: dict[int, str] = field(default_factory=dict[int, str])
    signs: dict[int, Signs] = field(default_factory=dict[int, Signs])
    leaving: str = ""

    def message(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(message: dict[str, Any]) -> Report:
        """
        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        return Report(
            int(message["number"]),
            {int(pid): str(how) for pid, how in message["ended"].items()},
            {int(pid): Signs(**signs) for pid, signs in message["signs"].items()},
            str(message["leaving"]),
        )


def send(writer: StreamWriter, message: dict[str, Any]) -> None:
    """Hand a message on; a connection that is gone takes it, too."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: StreamReader) -> dict[str, Any]:
    """The next message.

    Raises:
        ConnectionError: the connection has ended, or what comes is no message.
    """
    try:
        line = await reader.readline()
        message = json.loads(line) if line else None
    except (ValueError, OSError) as error:
        raise ConnectionError(f"no message: {error!r}") from error
    if not isinstance(message, dict):
        raise ConnectionError("it has ended")
    return message


logger = logging.getLogger(__name__)

BEAT_S = 0.25
DISMISSED = "the run goes on without this host"
UNANSWERED_S = 4 * BEAT_S
"""After so long without an answer another connection is made: one that has waited for its packets goes on late."""
_ATTEMPTS = 12  # connections that are being made at a time


@dataclass(frozen=True, slots=True)
class LookoutSettings:
    """Where the controller listens for a host.

    Args:
        token: says which host this is, and that it may.
        lease_s: how long the host's processes go on without hearing of the controller.
    """

    address: str
    port: int
    token: str
    lease_s: float


class Lookout:
    """Reports to the controller several times a second, and ends the processes of its host when it hears nothing of it
    for `lease_s`: whoever cannot be reached has been replaced elsewhere by then.

    Args:
        path: of the socket where the processes of the host begin their pulse.
        leaving: says why the host is about to go; empty while it stays.
        stands_still: whether what starts processes here does nothing, of which nobody else would hear; where that lasts
            for `lease_s`, the host is of no more use.
    """

    def __init__(
        self,
        settings: LookoutSettings,
        path: Path,
        leaving: Callable[[], str] = str,
        stands_still: Callable[[], bool] = bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._leaving = leaving
        self._stands_still = stands_still
        self._clock = clock
        self._watch = HostWatch(path, self._ended)
        self._ends: dict[int, tuple[int, str]] = {}  # pid -> number of the first report with it, how it ended
        self._signs: dict[int, Signs] = {}
        self._number = 0
        self._contact = Contact(settings.lease_s, 4 * BEAT_S, clock())
        self._starter = Contact(settings.lease_s, 4 * BEAT_S, clock())
        self._hurry = asyncio.Event()
        self._over: asyncio.Future[str]

    async def run(self) -> str:
        """Until the controller has no more use for this host, or is lost. What is left of the host's processes is
        killed.

        Returns:
            why it is over: `DISMISSED` where the controller is done with this host.
        """
        self._over = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            parts = [tasks.create_task(part) for part in (self._watch.run(), self._look(), self._keep_connected())]
            reason = await self._over
            self._watch.kill_all()
            for part in parts:
                part.cancel()
        return reason

    def _ended(self, pid: int, how: str) -> None:
        self._ends[pid] = self._number + 1, how
        self._hurry.set()

    async def _look(self) -> None:
        looked_at = self._clock()
        while not self._over.done():
            await asyncio.sleep(BEAT_S)
            now = self._clock()
            if now - looked_at >= LOOK_S:
                looked_at, self._signs = now, self._watch.look()
            if self._contact.look(now):
                self._end(f"nothing has been heard of the controller for {self._settings.lease_s:g} s")
            if not self._stands_still():
                self._starter.heard()
            if self._starter.look(now):
                self._end(f"what starts processes here has been stopped for {self._settings.lease_s:g} s")

    def _end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)

    async def _keep_connected(self) -> None:
        while True:
            with contextlib.suppress(ConnectionError, TimeoutError):
                reader, writer = await self._connect()
                try:
                    await self._talk(reader, writer)
                finally:
                    writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The first connection that comes about. Another is begun every `BEAT_S`: the packets of one that was begun
        while the link was down are sent again late."""
        attempts: list[asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = []
        try:
            while True:
                if len(attempts) == _ATTEMPTS:
                    attempts.pop(0).cancel()
                opening = asyncio.open_connection(self._settings.address, self._settings.port, limit=LONGEST_LINE)
                attempts.append(asyncio.ensure_future(opening))
                done, _ = await asyncio.wait(attempts, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    attempts.remove(attempt)
                    if (error := attempt.exception()) is None:
                        return attempt.result()
                    if isinstance(error, ConnectionRefusedError):
                        self._end("the controller has ended: its host answers, and nobody listens there")
                if done:
                    await asyncio.sleep(BEAT_S)
        finally:
            for attempt in attempts:
                attempt.cancel()
                attempt.add_done_callback(_close_late)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        send(writer, {"token": self._settings.token})
        beating = asyncio.ensure_future(self._beat(writer))
        try:
            while True:
                async with asyncio.timeout(UNANSWERED_S):
                    self._take(await receive(reader))
        finally:
            beating.cancel()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            self._hurry.clear()
            self._number += 1
            ended = {pid: how for pid, (_, how) in self._ends.items()}
            quiet = {pid: signs for pid, signs in self._signs.items() if signs != Signs()}
            send(writer, Report(self._number, ended, quiet, self._leaving()).message())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._hurry.wait()

    def _take(self, message: dict[str, Any]) -> None:
        self._contact.heard()
        known = message.get("known", 0)
        self._ends = {pid: (first, how) for pid, (first, how) in self._ends.items() if first > known}
        for pid in message.get("kill", ()):
            self._watch.kill(pid)
        if over := message.get("over"):
            self._end(over)


def _close_late(attempt: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result()[1].close()
