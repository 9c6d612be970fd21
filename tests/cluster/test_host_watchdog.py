"""Health checks and watchdogs of real processes on this host, and a controller that they report to over a socket."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from background import HANG_S, in_background

from titan_rl.cluster.liveness import health_check, heartbeat
from titan_rl.cluster.liveness.health_check import HELLO, HealthChecks, ProcessHealth
from titan_rl.cluster.liveness.heartbeat import (
    DISMISSED,
    HostMonitor,
    HostWatchdog,
    RemoteWatcher,
    Report,
    WatchdogSettings,
    send,
)
from titan_rl.cluster.liveness.local_processes import TreeUse
from titan_rl.cluster.liveness.loop_thread import LoopThread
from titan_rl.testing.clock import ManualClock

LOCALHOST = "127.0.0.1"


@asynccontextmanager
async def process(socket: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Process that answers pings."""
    program = Path(__file__).with_name("pulsing.py")
    started = await asyncio.create_subprocess_exec(
        sys.executable, str(program), str(socket), stdout=asyncio.subprocess.PIPE
    )
    assert started.stdout is not None
    try:
        assert await asyncio.wait_for(started.stdout.readline(), HANG_S) == b"pulsing\n"
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def until(condition) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110  another process changes it
            await asyncio.sleep(0.005)


async def test_stopped_process_is_silent_until_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health_check, "use_of", lambda pid: TreeUse({}, False))
    watch = HealthChecks(tmp_path / "s", clock=ManualClock(tick_s=1.0))
    async with in_background(watch.run()), process(tmp_path / "s") as pulsing:

        def silent_s() -> float:
            return signs.silent_s if (signs := watch.look().get(pulsing.pid)) else -1

        await until(lambda: silent_s() == 0)
        os.kill(pulsing.pid, signal.SIGSTOP)
        await until(lambda: silent_s() > 20)
        os.kill(pulsing.pid, signal.SIGCONT)
        await until(lambda: silent_s() == 0)


class Ends:
    """The ends of processes."""

    def __init__(self) -> None:
        self.queue = asyncio.Queue[str]()

    def process_ended(self, pid: int, how: str) -> None:
        self.queue.put_nowait(f"{pid}: {how}")


async def test_reports_the_end_of_a_process_gone_before_its_hello(tmp_path: Path):
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    ends = Ends()
    watch = HealthChecks(tmp_path / "s", ends)
    async with in_background(watch.run()):
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(HELLO.pack(gone.pid))
        assert await next_of(ends.queue) == f"{gone.pid}: process {gone.pid} ended"
    writer.close()


def test_loop_thread_start_failure_is_raised_in_the_caller(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None: ...

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        coroutine.close()
        raise OSError("too many open files")

    monkeypatch.setattr(asyncio, "run", run)
    entered = ThreadPoolExecutor(1).submit(LoopThread("watching", main()).__enter__)
    with pytest.raises(OSError, match="too many open files"):
        entered.result(HANG_S)


async def test_process_ends_when_its_health_checks_end(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    watch = HealthChecks(tmp_path / "s")
    running = asyncio.ensure_future(watch.run())
    async with process(tmp_path / "s") as pulsing:
        await until(watch.look)  # it is registered
        running.cancel()
        await asyncio.wait_for(pulsing.wait(), HANG_S)
    assert not caplog.records, "this is not a failure"


class Controller:
    """Controller that owns a host and observes a process there."""

    def __init__(self, monitor: HostMonitor) -> None:
        self.lost = asyncio.Queue[str]()
        self.leaving = asyncio.Queue[str]()
        self.ends = asyncio.Queue[str]()
        self.health = ProcessHealth()
        self.watcher: RemoteWatcher = monitor.expect("h1", self)

    def host_lost(self, name: str, reason: str) -> None:
        self.lost.put_nowait(reason)

    def host_leaving(self, name: str, reason: str) -> None:
        self.leaving.put_nowait(reason)

    async def watch(self, pid: int) -> None:
        self.watcher.watch(pid, self)

    def ended(self, how: str) -> None:
        self.ends.put_nowait(how)

    def checked(self, health: ProcessHealth) -> None:
        self.health = health


async def next_of(queue: asyncio.Queue[str]) -> str:
    return await asyncio.wait_for(queue.get(), HANG_S)


async def test_remote_death_is_reported_with_its_signal(tmp_path: Path):
    with HostMonitor(LOCALHOST, silence_s=HANG_S, lease_s=HANG_S) as monitor:
        controller = Controller(monitor)
        watchdog = asyncio.ensure_future(HostWatchdog(controller.watcher.settings, tmp_path / "s").run())
        async with process(tmp_path / "s") as first, process(tmp_path / "s") as second:
            await controller.watch(first.pid)
            first.kill()
            assert "SIGKILL" in await next_of(controller.ends) or first.returncode is not None
            await controller.watch(second.pid)
            controller.watcher.kill(second.pid)
            await next_of(controller.ends)
            assert await asyncio.wait_for(second.wait(), HANG_S) == -signal.SIGKILL
        controller.watcher.dismiss()
        assert await asyncio.wait_for(watchdog, HANG_S) == DISMISSED


async def test_processor_time_of_a_remote_process_reaches_the_controller(tmp_path: Path):
    with HostMonitor(LOCALHOST, silence_s=HANG_S, lease_s=100 * HANG_S) as monitor:
        controller, clock = Controller(monitor), ManualClock(tick_s=1.0)
        running = HostWatchdog(controller.watcher.settings, tmp_path / "s", clock=clock).run()
        async with in_background(running), process(tmp_path / "s") as pulsing:
            await controller.watch(pulsing.pid)
            await until(lambda: controller.health.work_s > 0)
            assert controller.health.processor_s > controller.health.work_s


async def test_silent_host_is_lost_with_its_processes_and_rejected_later(tmp_path: Path):
    clock = ManualClock()
    with HostMonitor(LOCALHOST, silence_s=3, lease_s=HANG_S, clock=clock) as monitor:
        controller = Controller(monitor)
        watchdog = asyncio.ensure_future(HostWatchdog(controller.watcher.settings, tmp_path / "s").run())
        async with process(tmp_path / "s") as pulsing:
            await controller.watch(pulsing.pid)
            watchdog.cancel()  # as though its packets were lost
            clock.tick_s = 1.0
            assert await next_of(controller.lost) == "no heartbeat for 3 s"
            assert await next_of(controller.ends) == "host h1 is lost: no heartbeat for 3 s"
        again = HostWatchdog(controller.watcher.settings, tmp_path / "again")
        assert await asyncio.wait_for(again.run(), HANG_S) == "no heartbeat of host h1 for 3 s"


async def test_watchdog_ends_processes_when_their_parent_stays_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = ManualClock()
    monkeypatch.setattr(heartbeat, "is_stopped", lambda pid: clock.tick_s > 0)
    with HostMonitor(LOCALHOST, silence_s=HANG_S, lease_s=10) as monitor:
        controller = Controller(monitor)
        watchdog = HostWatchdog(controller.watcher.settings, tmp_path / "s", clock=clock)
        looking = asyncio.ensure_future(watchdog.run())
        async with process(tmp_path / "s") as pulsing:
            await asyncio.wait_for(controller.watcher.first_heartbeat.wait(), HANG_S)
            clock.tick_s = 1.0
            assert await asyncio.wait_for(pulsing.wait(), HANG_S) == -signal.SIGKILL
        assert (
            await asyncio.wait_for(looking, HANG_S) == "the process that starts others here has been stopped for 10 s"
        )


async def test_watchdog_ends_processes_when_the_controller_is_unreachable(tmp_path: Path):
    silent = await asyncio.start_server(lambda reader, writer: None, LOCALHOST, 0)
    port = silent.sockets[0].getsockname()[1]
    clock, settings = ManualClock(), WatchdogSettings(LOCALHOST, port, "x", 3.0)
    watchdog = asyncio.ensure_future(HostWatchdog(settings, tmp_path / "s", clock=clock).run())
    async with process(tmp_path / "s") as pulsing:
        clock.tick_s = 1.0
        assert "no message from the controller for 3 s" in await asyncio.wait_for(watchdog, HANG_S)
        await asyncio.wait_for(pulsing.wait(), HANG_S)
    silent.close()


async def test_watchdog_ends_at_once_when_the_controller_has_ended(tmp_path: Path):
    with HostMonitor(LOCALHOST, silence_s=HANG_S, lease_s=10 * HANG_S) as monitor:
        settings = Controller(monitor).watcher.settings
    reason = await asyncio.wait_for(HostWatchdog(settings, tmp_path / "s").run(), HANG_S)
    assert reason.startswith("the controller has ended")


async def test_leaving_host_announces_it_once(tmp_path: Path):
    with HostMonitor(LOCALHOST, silence_s=HANG_S, lease_s=HANG_S) as monitor:
        controller = Controller(monitor)
        leaving = tmp_path / "leaving"
        running = asyncio.ensure_future(HostWatchdog(controller.watcher.settings, tmp_path / "s", leaving).run())
        leaving.write_text("SIGTERM")
        assert await next_of(controller.leaving) == "SIGTERM"
        controller.watcher.dismiss()
        assert await asyncio.wait_for(running, HANG_S) == DISMISSED
        assert controller.leaving.empty()


async def test_monitor_ignores_a_connection_without_the_token():
    with HostMonitor(LOCALHOST, silence_s=HANG_S, lease_s=HANG_S) as monitor:
        controller = Controller(monitor)
        settings = controller.watcher.settings
        reader, writer = await asyncio.open_connection(LOCALHOST, settings.port)
        writer.write(b'{"token": "guess"}\n{"number": 1, "ended": {}, "signs": {}, "leaving": "now"}\n')
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""
        writer.close()
        assert controller.leaving.empty()


if not hasattr(os, "pidfd_open"):
    pytestmark = pytest.mark.skip("this kernel has no pidfd_open")


async def test_run_end_with_a_connected_watchdog_logs_nothing(caplog: pytest.LogCaptureFixture):
    with HostMonitor(LOCALHOST, silence_s=HANG_S, lease_s=HANG_S) as monitor:
        settings = Controller(monitor).watcher.settings
        reader, writer = await asyncio.open_connection(settings.address, settings.port)
        send(writer, {"token": settings.token})
        send(writer, Report(0).message())
        assert await asyncio.wait_for(reader.readline(), HANG_S), "the monitor answers"
    assert await reader.read() == b""
    writer.close()
    assert not caplog.records
