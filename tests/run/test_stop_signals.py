"""Ctrl-C and SIGTERM, in programs of their own: with a loop that runs, or is held up, or never returns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from background import HANG_S
from user_project import project

from titan_rl.cluster.liveness.local_processes import children_of
from titan_rl.run.machine.signals import StopSignals
from titan_rl.run.terminal.standard_streams import StderrConsole

__all__ = ["project"]


SETTING_UP = """
import asyncio, signal, sys
from titan_rl.run import train
from titan_rl.config.load import load_config

async def setting_up(*args):
    signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(1000)

train._train = setting_up
sys.exit(train.run_training(load_config("config.toml")).code)
"""

PROGRAM = """
import asyncio, ctypes, os, pathlib, sys, time
from titan_rl.run.machine.guard import guarded
from titan_rl.cluster.hosts.folders import scratch_root
from titan_rl.run.machine.process_environment import run_environment
from titan_rl.run.machine.signals import StopSignals

def native():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)  # never returns, and keeps Python's lock

def sleep():
    print("ready", flush=True)
    time.sleep(1000)

async def run(what, signals):
    with signals.ending_in_order():
        try:
            if what == "idle":
                print("ready", flush=True)
                await asyncio.sleep(1000)
            else:
                globals()[what]()
        except asyncio.CancelledError:
            print("stopping", flush=True)
            await asyncio.to_thread(input)  # saves

stops = StopSignals("stopping in order", "ended at once", reaction_s=0.5)
with stops as signals, guarded(scratch_root(), "no-run", "to go on: titan-rl train --resume here"), run_environment():
    print(os.environ["TMPDIR"], flush=True)
    asyncio.run(run(sys.argv[1], signals))
print("ended in order", flush=True)
"""


class Program:
    """It holds a scratch folder, as a run does."""

    def __init__(self, what: str, temporary: Path, sigint: Any = signal.SIG_DFL) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, what],
            env=os.environ | {"TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),
        )
        self.scratch = Path(self.line())
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def told(self) -> str:
        """The next line on standard error."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().strip()

    def last_told(self) -> str:
        """Of a program that has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().splitlines()[-1]

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def wait(self) -> int:
        return self.process.wait(HANG_S)

    def wait_until_clean(self, *files: Path) -> None:
        deadline = time.monotonic() + HANG_S
        while left := [path for path in (self.scratch, *files) if path.exists()]:
            assert time.monotonic() < deadline, f"{left} is left"
            time.sleep(0.05)


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    import shutil
    import tempfile

    temporary = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short: a longer one is not used for scratch
    started: list[Program] = []

    def begin(what: str, **options: Any) -> Program:
        started.append(Program(what, temporary, **options))
        return started[-1]

    yield begin
    for program in started:
        program.process.kill()
        program.process.communicate()
    shutil.rmtree(temporary)


STOPS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", STOPS)
def test_the_first_signal_is_told_of_at_once_and_stops_in_order(start: Callable[..., Program], number: signal.Signals):
    program = start("idle")
    program.process.send_signal(number)
    assert program.told() == f"titan-rl: {number.name}: stopping in order"
    assert program.line() == "stopping"
    program.say("saved")
    assert program.line() == "ended in order"
    assert program.wait() == 0
    assert not program.scratch.exists()


@pytest.mark.parametrize(("what", "number"), [("idle", signal.SIGTERM), ("sleep", signal.SIGINT)])
def test_a_second_signal_ends_the_program_at_once(start: Callable[..., Program], what: str, number: signal.Signals):
    program = start(what)
    program.process.send_signal(signal.SIGINT)
    assert program.told() == "titan-rl: SIGINT: stopping in order"
    time.sleep(0.35)  # two signals closer together are one
    program.process.send_signal(number)
    assert program.wait() == 128 + number
    program.wait_until_clean()
    assert program.last_told() == f"titan-rl: {number.name}: ended at once"


def test_a_program_that_native_code_holds_up_is_killed_by_the_second_signal(start: Callable[..., Program]):
    program = start("native")
    program.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    program.process.send_signal(signal.SIGINT)
    assert program.wait() == -signal.SIGKILL
    program.wait_until_clean()
    said = "titan-rl: the run does not react, and is killed; to go on: titan-rl train --resume here"
    assert program.last_told() == said


def test_a_program_that_is_killed_is_cleaned_up_after(start: Callable[..., Program]):
    program = start("idle")
    log = program.scratch.parent / f"monarch_log_{program.scratch.name}.log"  # in a folder of /tmp, as Monarch does
    log.touch()
    program.process.kill()
    program.wait()
    program.wait_until_clean(log)


def test_signals_that_come_together_are_one(start: Callable[..., Program]):
    program = start("idle")
    for number in STOPS:  # as `timeout` sends to the process and to its group
        program.process.send_signal(number)
    assert program.line() == "stopping"
    program.say("saved")
    assert program.line() == "ended in order"


def test_a_held_up_loop_is_told_of(start: Callable[..., Program]):
    program = start("sleep")
    program.process.send_signal(signal.SIGTERM)
    assert program.told() == "titan-rl: SIGTERM: stopping in order"
    assert "nothing has been stopped for 0.5 s" in program.told()


def test_a_sigint_that_the_shell_ignores_stays_ignored_and_sigterm_stops(start: Callable[..., Program]):
    program = start("idle", sigint=signal.SIG_IGN)
    program.process.send_signal(signal.SIGINT)
    program.process.send_signal(signal.SIGTERM)
    assert program.told() == "titan-rl: SIGTERM: stopping in order"
    program.say("saved")
    assert program.wait() == 0


def test_a_stop_while_a_run_is_set_up_does_not_speak_of_a_step_that_is_trained(project: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SETTING_UP], capture_output=True, text=True, timeout=HANG_S, cwd=project
    )
    assert ended.returncode == 130, ended.stderr
    assert "SIGINT: stopping: the run is still being set up" in ended.stderr
    assert "being trained is finished" not in ended.stderr
    assert "stopped before a step was trained; to continue: titan-rl train --resume" in ended.stderr


def test_what_a_stop_says_changes_with_what_the_program_is_at() -> None:
    told: list[str] = []

    class Listener(StderrConsole):
        def end_with(self, text: str) -> None:
            told.append(text)

    with StopSignals("at first", "ended", Listener(), reaction_s=60) as signals:
        signals.stopping = "later"
        signal.raise_signal(signal.SIGTERM)
    assert told == ["SIGTERM: later"]


def test_the_guard_outlives_a_signal_to_all_that_a_job_has(start: Callable[..., Program]) -> None:
    program = start("idle")
    children = children_of(program.process.pid)
    guards = [pid for pid in children if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    deadline = time.monotonic() + HANG_S
    while not (guards and all(map(ignores_sigterm, guards))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for guard in guards:
        os.kill(guard, signal.SIGTERM)
    program.process.kill()
    program.wait_until_clean()


def ignores_sigterm(pid: int) -> bool:
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line]
    return bool(int(mask, 16) & 1 << signal.SIGTERM - 1)
