"""Calls to a process that ends: real processes, and an endpoint that never answers."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.liveness.health_check import LocalHealthChecks
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.core.errors import ActorDiedError

LIMIT_S = 240


class Silent:
    """An endpoint that accepts every call and never answers."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def call_one(self) -> None:
        self.called.set()
        await asyncio.Event().wait()


class Owner:
    """Records the processes that ended."""

    def __init__(self) -> None:
        self.ended: list[RemoteProcess] = []

    def process_ended(self, remote: RemoteProcess) -> None:
        self.ended.append(remote)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Runs until it is killed or reads a line."""
    with subprocess.Popen([sys.executable, "-c", "exit(int(input()))"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_killed_process_fails_pending_and_later_calls(process) -> None:
    owner = Owner()
    remote, endpoint = RemoteProcess("trainer", owner), Silent()
    remote.watch([process.pid], LocalHealthChecks())
    calls = [asyncio.ensure_future(remote.call(endpoint)) for _ in range(3)]
    await endpoint.called.wait()
    process.kill()
    for call in [*calls, remote.call(endpoint)]:
        with pytest.raises(ActorDiedError, match=rf"trainer died: process {process.pid} was killed by SIGKILL"):
            await asyncio.wait_for(call, LIMIT_S)
    remote.end("again")
    assert owner.ended == [remote]


async def test_error_contains_the_exit_status(process) -> None:
    remote, endpoint = RemoteProcess("generator-0"), Silent()
    remote.watch([process.pid], LocalHealthChecks())
    call = asyncio.ensure_future(remote.call(endpoint))
    await endpoint.called.wait()
    process.stdin.write(b"3\n")
    process.stdin.flush()
    with pytest.raises(ActorDiedError, match="exited with status 3"):
        await asyncio.wait_for(call, LIMIT_S)


async def test_watching_an_exited_process_reports_its_death(process) -> None:
    process.kill()
    process.wait()
    remote = RemoteProcess("generator-0")
    remote.watch([process.pid], LocalHealthChecks())
    with pytest.raises(ActorDiedError, match="generator-0 died"):
        await remote.call(Silent())


async def test_remaining_processes_of_a_group_are_killed(process) -> None:
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    remote = RemoteProcess("trainer")
    remote.watch([process.pid, other.pid], LocalHealthChecks())
    process.kill()
    assert await asyncio.wait_for(other.wait(), LIMIT_S) == -signal.SIGKILL
    with pytest.raises(ActorDiedError, match=f"process {process.pid}"):
        await remote.call(Silent())


async def test_exit_after_close_is_not_reported(process) -> None:
    owner = Owner()
    remote = RemoteProcess("trainer", owner)
    open_before = len(os.listdir("/proc/self/fd"))
    remote.watch([process.pid], LocalHealthChecks())
    remote.close()
    process.kill()
    process.wait()
    await asyncio.sleep(0)
    assert (owner.ended, remote.reason) == ([], None)
    assert len(os.listdir("/proc/self/fd")) == open_before


async def test_call_can_be_cancelled_and_timeout_names_the_limit() -> None:
    remote, endpoint = RemoteProcess("generator-0"), Silent()
    call = asyncio.ensure_future(remote.call(endpoint))
    await endpoint.called.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(ActorDiedError, match=r"generator-0 did not answer within 0\.01 s"):
        await remote.call(endpoint, timeout_s=0.01)
