"""Heartbeats from a host to the controller: the messages, the silence timer, the watchdog on the host that sends them,
and the monitor in the controller that receives them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from titan_rl.cluster.liveness.health_check import HEALTHY, LOOK_S, HealthChecks, ProcessHealth, ProcessObserver
from titan_rl.cluster.liveness.local_processes import is_stopped
from titan_rl.cluster.liveness.loop_thread import LoopThread, call_in
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
        health: Health of each process by pid.
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
                self._end(f"no message from the controller for {self._settings.lease_s:g} s")
            if not is_stopped(os.getppid()):  # nobody else would notice that it cannot start processes
                self._starter.reset()
            if self._starter.look(now):
                self._end(f"the process that starts others here has been stopped for {self._settings.lease_s:g} s")

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
                        self._end("the controller has ended: its host answers, but nothing listens there")
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
            send(writer, Report(self._number, ended, self._health, self._reason_to_leave()).message())
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


HELLO_S = 5.0
GREETING_S = 30.0
"""Longest time until the first heartbeat of a host that has joined, in seconds."""


@dataclass(slots=True)
class _Host:
    """State of one host in the monitor's thread."""

    name: str
    silence: SilenceTimer
    watcher: RemoteWatcher
    loop: asyncio.AbstractEventLoop
    over: str = ""  # reason why the host is lost or dismissed
    writer: asyncio.StreamWriter | None = None
    kill: set[int] = field(default_factory=set[int])


class HostOwner(Protocol):
    """Listener for the monitor's findings about a host."""

    def host_lost(self, name: str, reason: str) -> None:
        """Handle the loss of the host, which does not respond."""
        ...

    def host_leaving(self, name: str, reason: str) -> None:
        """Handle the announcement of the host that it is about to shut down."""
        ...


class HostMonitor:
    """Receives the heartbeats of hosts in its own thread, so that hosts do not mistake a busy controller for a dead
    one. Used as a context manager for the duration of a run.

    Args:
        address: Address of this machine at which the other hosts reach it.
        silence_s: Time without a heartbeat after which a host is lost, in seconds. A lost host cannot come back,
            because its work has been replaced.
        lease_s: Time for which a host continues without a message, in seconds; see `WatchdogSettings`.
    """

    def __init__(self, address: str, *, silence_s: float, lease_s: float, clock: Clock = CLOCK) -> None:
        self._address = address
        self._silence_s = silence_s
        self._lease_s = lease_s
        self._clock = clock
        self._hosts: dict[str, _Host] = {}  # by token; lost hosts stay, so that they are dismissed if they reconnect

    def __enter__(self) -> HostMonitor:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        self._socket = socket.create_server((self._address, 0), family=family)
        self._thread = LoopThread("host-monitor", self._serve())
        self._thread.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.__exit__()

    def expect(self, name: str, owner: HostOwner) -> RemoteWatcher:
        """Watch a host that is about to send heartbeats. Called in the event loop in which the owner is notified.

        Args:
            owner: Notified once if the host does not respond, and once if it announces that it is about to shut down.
        """
        token = secrets.token_hex(16)
        settings = WatchdogSettings(self._address, self._socket.getsockname()[1], token, self._lease_s)
        silence = SilenceTimer(self._silence_s, 2 * BEAT_S, self._clock.now())
        silence.silent_s = self._silence_s - GREETING_S
        watcher = RemoteWatcher(name, settings, owner, self, silence)
        host = _Host(name, silence, watcher, asyncio.get_running_loop())
        call_in(self._thread.loop, self._hosts.__setitem__, token, host)
        return watcher

    def command(self, token: str, pids: set[int], over: str) -> None:
        """Have a host kill these processes, or end all of them with the reason `over`. Thread-safe."""
        call_in(self._thread.loop, self._command, token, pids, over)

    # The methods below run in the monitor's thread.

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._accept, sock=self._socket, limit=LONGEST_LINE):
            while True:
                await asyncio.sleep(BEAT_S)
                self._look()

    def _look(self) -> None:
        now = self._clock.now()
        for host in self._hosts.values():
            if not host.over and host.silence.look(now):
                host.over = f"no heartbeat of host {host.name} for {self._silence_s:g} s"
                call_in(host.loop, host.watcher.lose, f"no heartbeat for {self._silence_s:g} s")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await receive(reader)
            host = self._hosts.get(str(hello.get("token")))
            if host is None:
                return
            if host.writer is not None:
                host.writer.close()
            host.writer = writer
            while True:
                report = Report.of(await receive(reader))
                answer: dict[str, Any] = {"known": report.number, "kill": sorted(host.kill), "over": host.over}
                send(writer, answer)
                host.kill -= report.ended.keys()
                if not host.over:
                    host.silence.reset()
                    call_in(host.loop, host.watcher.receive, report)
        except (ConnectionError, TimeoutError, KeyError, TypeError, ValueError):
            pass  # the watchdog connects again
        except asyncio.CancelledError:
            pass  # the run ends; asyncio would log a cancelled handler as a failure
        finally:
            writer.close()

    def _command(self, token: str, pids: set[int], over: str) -> None:
        host = self._hosts[token]
        host.kill |= pids
        host.over = host.over or over
        if host.writer is not None:
            send(host.writer, {"kill": sorted(host.kill), "over": host.over})


class RemoteWatcher:
    """`Watcher` of the processes of one other host, in the event loop of the controller. Made by `HostMonitor.expect`.

    Attributes:
        name: Name of the host.
        settings: Settings for the watchdog on the host.
        reason: Reason why the host is gone; None while it is in contact.
        first_heartbeat: Event that is set once a heartbeat of the host has arrived.
    """

    def __init__(
        self, name: str, settings: WatchdogSettings, owner: HostOwner, monitor: HostMonitor, silence: SilenceTimer
    ) -> None:
        self.name = name
        self.settings = settings
        self.reason: str | None = None
        self.first_heartbeat = asyncio.Event()
        self._owner = owner
        self._monitor = monitor
        self._silence = silence
        self._has_announced = False
        self._watched: dict[int, ProcessObserver] = {}  # by pid
        self._ended: dict[int, str] = {}  # of processes that are not watched yet

    def take_silence(self) -> float:
        """Return the longest time in seconds without a heartbeat of the host since the previous call."""
        return self._silence.take_longest()

    def watch(self, pid: int, observer: ProcessObserver) -> None:
        if self.reason is not None or pid in self._ended:
            raise ProcessLookupError(self._ended.pop(pid, self.reason))
        self._watched[pid] = observer

    def dismiss(self) -> None:
        """Dismiss the host: its watchdog ends, with all processes that remain there."""
        self.reason = self.reason or DISMISSED
        self._monitor.command(self.settings.token, set(), DISMISSED)

    def receive(self, report: Report) -> None:
        self.first_heartbeat.set()
        for pid, how in report.ended.items():
            observer = self._watched.pop(pid, None)
            if observer is None:
                self._ended[pid] = how
            else:
                observer.ended(f"{how} on host {self.name}")
        for pid, observer in list(self._watched.items()):
            observer.checked(report.health.get(pid, HEALTHY))
        if report.leaving and not self._has_announced:
            self._has_announced = True
            self._owner.host_leaving(self.name, report.leaving)

    def lose(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            watched, self._watched = self._watched, {}
            self._owner.host_lost(self.name, reason)  # first, so that the ends below count as excused
            for observer in watched.values():
                observer.ended(f"host {self.name} is lost: {reason}")

    def kill(self, pid: int) -> None:
        self._monitor.command(self.settings.token, {pid}, "")

    def forget(self, pid: int) -> None:
        self._watched.pop(pid, None)
