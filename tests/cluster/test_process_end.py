"""Descriptions of how a process ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from background import HANG_S

from titan_rl.cluster.liveness.local_processes import exit_description
from titan_rl.cluster.processes.remote_process import RemoteProcess

KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "exit(int(input()))"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize(
    ("act", "description"),
    [
        (lambda process: process.send_signal(signal.SIGSEGV), "was killed by SIGSEGV"),
        (lambda process: process.kill(), "was killed by SIGKILL"),
        (lambda process: process.stdin.write(b"3\n"), "exited with status 3"),
    ],
)
def test_exit_description_names_signal_or_status_even_after_reaping(process, act, description, collected):
    if collected and KERNEL < (6, 15):
        pytest.skip("this kernel forgets the status once the parent has collected it")
    descriptor = os.pidfd_open(process.pid)
    act(process)
    process.stdin.close()
    if collected:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert exit_description(descriptor) == description
    finally:
        os.close(descriptor)


def test_exit_description_of_a_grandchild_names_the_signal():
    """As for a generator, whose parent is a fork server."""
    program = "import os, time; pid = os.fork(); pid and print(pid, flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        descriptor = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(HANG_S * 1000)
        try:
            assert exit_description(descriptor) == "was killed by SIGKILL"
        finally:
            os.close(descriptor)
            parent.kill()


def test_end_reason_does_not_repeat_the_process_name():
    for reason in ("trainer died: timeout", "timeout", "it did not start: trainer died: timeout"):
        remote = RemoteProcess("trainer")
        remote.end(reason)
        assert remote.reason == reason.replace("trainer died: ", "")
