"""Heartbeats from a host to the controller: the messages, the silence timer, and the watchdog on the host that sends
them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from asyncio import StreamReader, StreamWriter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.cluster.liveness.health_check import LOOK_S, HealthChecks, ProcessHealth
from titan_rl.cluster.liveness.local_processes import is_stopped
from titan_rl.core.clock import CLOCK, Clock


class SilenceTimer:
    """Measures how long nothing has arrived from the other end of a link.

    Each interval between two calls of `look` counts for at most `longest_look_s`: if the observer itself was stopped or
    starved, messages that arrived meanwhile are still unread, so the other end was not silent.

    Example: a host may be silent for 3 s, and is checked four times a second:

        silence = SilenceTimer(limit_s=3.0, longest_look_s=0.5, now=clock.now())
        silence.reset()
        silence.look(clock.now())  # False: it is alive
    """

    def __init__(self, limit_s: float, longest_look_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._longest_look_s = longest_look_s
        self._looked_at = now
        self.silent_s = 0.0
        self._longest_s = 0.0

    def reset(self) -> None:
        self.silent_s = 0.0

    def look(self, now: float) -> bool:
        """Advance to a time, and return whether the limit is reached."""
        self.silent_s += min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
        self._longest_s = max(self._longest_s, self.silent_s)
        return self.silent_s >= self._limit_s

    def take_longest(self) -> float:
        """Return the longest silence in seconds since the previous call. Thread-safe."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """State of the processes of one host. Reports are sent several times a second and serve as its heartbeat.

    Args:
        number: Increasing number, which the answer acknowledges.
        ended: Description of the end of each ended process by pid, until the controller has acknowledged it.
        health: Health of each process without a recent sign of life, by pid.
        leaving: Reason why the host is about to shut down and should be drained; empty while it stays.
    """

    number: int
    ended: dict[int, str] = field(default_factory=dict[int, str])
    health: dict[int, ProcessHealth] = field(default_factory=dict[int, ProcessHealth])
    leaving: str = ""

    def message(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(message: dict[str, Any]) -> Report:
        """Parse a report.

        Raises:
            KeyError, TypeError, ValueError: The message is no report.
        """
        return Report(
            int(message["number"]),
            {int(pid): str(how) for pid, how in message["ended"].items()},
            {int(pid): ProcessHealth(**health) for pid, health in message["health"].items()},
            str(message["leaving"]),
        )


def send(writer: StreamWriter, message: dict[str, Any]) -> None:
    """Send a message. Does nothing if the connection is gone."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: StreamReader) -> dict[str, Any]:
    """Receive the next message.

    Raises:
        ConnectionError: The connection has ended, or the line is not a message.
    """
    try:
        line = await reader.readline()
        message = json.loads(line) if line else None
    except (ValueError, OSError) as error:
        raise ConnectionError(f"no message: {error!r}") from error
    if not isinstance(message, dict):
        raise ConnectionError("it has ended")
    return message


BEAT_S = 0.25
DISMISSED = "the run continues without this host"
UNANSWERED_S = 4 * BEAT_S
"""Time without an answer after which a new connection is made, in seconds, because TCP retransmits lost packets only
after growing delays."""
_ATTEMPTS = 12  # most connection attempts at a time


@dataclass(frozen=True, slots=True)
class WatchdogSettings:
    """Settings of the watchdog of a host.

    Args:
        address, port: Address of the controller's monitor.
        token: Secret that identifies and authorizes the host.
        lease_s: Time for which the processes of the host continue without a message from the controller, in seconds.
    """

    address: str
    port: int
    token: str
    lease_s: float


class HostWatchdog:
    """Watchdog of one host: sends heartbeats and the state of its processes to the controller, and ends the processes
    if it hears nothing from the controller for `lease_s` seconds, because replacements run elsewhere by then.

    Args:
        path: Path of the socket for `answer_pings` on this host.
        leaving: File with the reason why the host is about to shut down. It exists only in that case.
    """

    def __init__(
        self,
        settings: WatchdogSettings,
        path: Path,
        leaving: Path | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._settings = settings
        self._leaving = leaving
        self._clock = clock
        self._watch = HealthChecks(path, self)
        self._ends: dict[int, tuple[int, str]] = {}  # pid -> number of the first report with it, how it ended
        self._health: dict[int, ProcessHealth] = {}
        self._number = 0
        self._silence = SilenceTimer(settings.lease_s, 4 * BEAT_S, clock.now())
        self._starter = SilenceTimer(settings.lease_s, 4 * BEAT_S, clock.now())
        self._hurry = asyncio.Event()
        self._over: asyncio.Future[str]

    async def run(self) -> str:
        """Run until the controller dismisses this host or is lost. Then the remaining processes are killed.

        Returns:
            The reason: `DISMISSED` if the controller no longer needs this host.
        """
        self._over = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            parts = [tasks.create_task(part) for part in (self._watch.run(), self._look(), self._keep_connected())]
            reason = await self._over
            self._watch.kill_all()
            for part in parts:
                part.cancel()
        return reason

    def process_ended(self, pid: int, how: str) -> None:
        self._ends[pid] = self._number + 1, how
        self._hurry.set()

    async def _look(self) -> None:
        looked_at = self._clock.now()
        while not self._over.done():
            await asyncio.sleep(BEAT_S)
            now = self._clock.now()
            if now - looked_at >= LOOK_S:
                looked_at, self._health = now, self._watch.look()
            if self._silence.look(now):
                self._end(f"nothing has been heard of the controller for {self._settings.lease_s:g} s")
            if not is_stopped(os.getppid()):  # nobody else would notice that it cannot start processes
                self._starter.reset()
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
        """Return the first connection that succeeds. A new attempt starts every `BEAT_S` seconds, because TCP retries
        an attempt made while the link was down only after a long delay."""
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
            quiet = {pid: health for pid, health in self._health.items() if health != ProcessHealth()}
            send(writer, Report(self._number, ended, quiet, self._reason_to_leave()).message())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._hurry.wait()

    def _reason_to_leave(self) -> str:
        try:
            return "" if self._leaving is None else self._leaving.read_text()
        except OSError:  # there is no such file
            return ""

    def _take(self, message: dict[str, Any]) -> None:
        self._silence.reset()
        known = message.get("known", 0)
        self._ends = {pid: (first, how) for pid, (first, how) in self._ends.items() if first > known}
        for pid in message.get("kill", ()):
            self._watch.kill(pid)
        if over := message.get("over"):
            self._end(over)


def _close_late(attempt: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result()[1].close()
