"""Host monitor: receives the heartbeats of other hosts in the controller, and detects hosts that fall silent."""

from __future__ import annotations

import asyncio
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any, Protocol

from titan_rl.cluster.liveness.health_check import HEALTHY, ProcessObserver
from titan_rl.cluster.liveness.heartbeat import (
    BEAT_S,
    DISMISSED,
    LONGEST_LINE,
    Report,
    SilenceTimer,
    WatchdogSettings,
    receive,
    send,
)
from titan_rl.cluster.liveness.loop_thread import LoopThread, call_in
from titan_rl.core.clock import CLOCK, Clock

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
    over: str = ""  # reason why the host is given up
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
        self._socket = socket.create_server((self._address, 0), family=_family(self._address))
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
                host.over = f"nothing has been heard of host {host.name} for {self._silence_s:g} s"
                call_in(host.loop, host.watcher.lose, f"nothing has been heard of it for {self._silence_s:g} s")

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
        self._watched: dict[int, _RemoteProcessWatch] = {}  # by pid
        self._ended: dict[int, str] = {}  # of processes that are not watched yet

    def take_silence(self) -> float:
        """Return the longest time in seconds without a heartbeat of the host since the previous call."""
        return self._silence.take_longest()

    def watch(self, pid: int, observer: ProcessObserver) -> _RemoteProcessWatch:
        if self.reason is not None or pid in self._ended:
            raise ProcessLookupError(self._ended.pop(pid, self.reason))
        watched = self._watched[pid] = _RemoteProcessWatch(self, pid, observer)
        return watched

    def dismiss(self) -> None:
        """Dismiss the host: its watchdog ends, with all processes that remain there."""
        self.reason = self.reason or DISMISSED
        self._monitor.command(self.settings.token, set(), DISMISSED)

    def receive(self, report: Report) -> None:
        self.first_heartbeat.set()
        for pid, how in report.ended.items():
            watched = self._watched.pop(pid, None)
            if watched is None:
                self._ended[pid] = how
            else:
                watched.observer.ended(f"{how} on host {self.name}")
        for pid, watched in list(self._watched.items()):
            watched.observer.checked(report.health.get(pid, HEALTHY))
        if report.leaving and not self._has_announced:
            self._has_announced = True
            self._owner.host_leaving(self.name, report.leaving)

    def lose(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            watched, self._watched = self._watched, {}
            self._owner.host_lost(self.name, reason)  # first, so that the ends below count as excused
            for one in watched.values():
                one.observer.ended(f"host {self.name} is lost: {reason}")

    def kill(self, pid: int) -> None:
        self._monitor.command(self.settings.token, {pid}, "")

    def forget(self, pid: int) -> None:
        self._watched.pop(pid, None)


@dataclass(frozen=True, slots=True)
class _RemoteProcessWatch:
    watcher: RemoteWatcher
    pid: int
    observer: ProcessObserver

    def kill(self) -> None:
        self.watcher.kill(self.pid)

    def close(self) -> None:
        self.watcher.forget(self.pid)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
