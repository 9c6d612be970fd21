"""Ctrl-C, SIGTERM and SIGHUP in separate programs, whose event loop runs, is blocked, or never returns."""

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
from depth import examples
from user_project import project

from titan_rl.cluster.liveness.local_processes import children_of
from titan_rl.core.run_files import ENDED_AT_ONCE, read_status
from titan_rl.run.process.guard import GRACE_S
from titan_rl.run.process.signals import StopSignals
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
import asyncio, ctypes, os, sys, time
from pathlib import Path
from titan_rl.run.process.guard import guarded
from titan_rl.cluster.hosts.folders import scratch_root
from titan_rl.run.process.environment import run_environment
from titan_rl.run.process.signals import StopSignals
from titan_rl.run.status import status_kept

def native():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)  # never returns, and keeps the GIL

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

folder = Path(sys.argv[2])
stops = StopSignals("stopping in order", "ended at once", run=folder, reaction_s=0.5)
guard = guarded(scratch_root(), "no-run", "continue: titan-rl train --resume here", folder)
with status_kept(folder, begins=True), stops as signals, guard, run_environment():
    print(os.environ["TMPDIR"], flush=True)
    asyncio.run(run(sys.argv[1], signals))
print("ended in order", flush=True)
"""


ELSEWHERE = """
import asyncio, os, signal, sys, threading, time
from contextlib import nullcontext
from pathlib import Path
from titan_rl.run.process.guard import guarded
from titan_rl.run.process.signals import StopSignals, run_to_its_end

async def idle(signals):
    with signals.ending_in_order():
        other.start()
        await asyncio.sleep(1000)

def receive():
    time.sleep(0.3)  # then the loop waits
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Event().wait()

other = threading.Thread(target=receive, daemon=True)
guard = guarded(Path(sys.argv[1]), "no-run", "") if sys.argv[2:] else nullcontext()
with StopSignals("stopping", "ended") as signals, guard:
    run_to_its_end(idle(signals))
print("stopped", flush=True)
os._exit(0)
"""

AT_RANDOM = """
import asyncio, os, random, signal, sys
from pathlib import Path
from titan_rl.run.process.guard import guarded
from titan_rl.run.process.signals import StopSignals
from titan_rl.run.terminal.standard_streams import StderrConsole

class Silent(StderrConsole):
    def end_with(self, text): ...

async def idle(signals):
    with signals.ending_in_order():
        send.write(b"\\n")  # asks for the next signal
        await asyncio.sleep(1000)

def send_signals(pid):
    while asked.read(1):
        for _ in range(random.randrange(3000)):
            pass
        os.kill(pid, signal.SIGHUP)
    os._exit(0)

read, write = os.pipe()
asked, send = open(read, "rb", 0), open(write, "wb", 0)
program = os.getpid()
if not os.fork():
    send.close()
    send_signals(program)
stops = 0
with guarded(Path(sys.argv[1]), "no-run", ""):
    for _ in range(int(sys.argv[2])):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignals("", "", Silent()) as signals:
            asyncio.run(idle(signals))
        stops += signals.code == 128 + signal.SIGHUP
print(stops, "stops", flush=True)
"""


class Program:
    """Separate program that holds a scratch folder, as a run does."""

    def __init__(self, what: str, temporary: Path, sigint: Any = signal.SIG_DFL, sighup: Any = signal.SIG_DFL) -> None:
        self.run = temporary / "run"
        self.run.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, what, str(self.run)],
            env=os.environ | {"TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: (signal.signal(signal.SIGINT, sigint), signal.signal(signal.SIGHUP, sighup)),
        )
        self.scratch = Path(self.line())
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stderr_line(self) -> str:
        """Return the next line of standard error."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().strip()

    def last_stderr_line(self) -> str:
        """Return the last line of standard error of a program that has ended."""
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


STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", STOPS)
def test_first_signal_is_reported_at_once_and_stops_in_order(start: Callable[..., Program], number: signal.Signals):
    program = start("idle")
    program.process.send_signal(number)
    assert program.stderr_line() == f"titan-rl: {number.name}: stopping in order"
    assert program.line() == "stopping"
    program.say("saved")
    assert program.line() == "ended in order"
    assert program.wait() == 0
    assert not program.scratch.exists()


@pytest.mark.parametrize("has_guard", [True, False])
def test_signal_that_does_not_interrupt_the_wait_of_the_loop_stops_it(tmp_path: Path, has_guard: bool) -> None:
    """The wait of the loop is not interrupted by a signal that another thread receives, or that arrives just before."""
    ended = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path), *["guard"][: int(has_guard)]],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.stdout == "stopped\n", ended.stderr


def test_no_signal_is_lost_at_random_moments(tmp_path: Path) -> None:
    rounds = examples(3000)
    ended = subprocess.run(
        [sys.executable, "-c", AT_RANDOM, str(tmp_path), str(rounds)], capture_output=True, text=True, timeout=HANG_S
    )
    assert ended.stdout == f"{rounds} stops\n", ended.stderr


@pytest.mark.parametrize(("what", "number"), [("idle", signal.SIGTERM), ("sleep", signal.SIGINT)])
def test_second_signal_ends_the_program_at_once(start: Callable[..., Program], what: str, number: signal.Signals):
    program = start(what)
    program.process.send_signal(signal.SIGINT)
    assert program.stderr_line() == "titan-rl: SIGINT: stopping in order"
    time.sleep(0.35)  # two signals closer together are one
    program.process.send_signal(number)
    assert program.wait() == 128 + number
    program.wait_until_clean()
    assert program.last_stderr_line() == f"titan-rl: {number.name}: ended at once"
    assert (read_status(program.run).state, read_status(program.run).reason) == ("stopped", ENDED_AT_ONCE)


def test_second_signal_kills_a_program_blocked_in_native_code(start: Callable[..., Program]):
    program = start("native")
    program.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    program.process.send_signal(signal.SIGINT)
    assert program.wait() == -signal.SIGKILL
    program.wait_until_clean()
    expected = "titan-rl: the run does not react, and is killed; continue: titan-rl train --resume here"
    assert program.last_stderr_line() == expected
    assert (read_status(program.run).state, read_status(program.run).reason) == ("stopped", ENDED_AT_ONCE)


def test_killed_program_is_cleaned_up(start: Callable[..., Program]):
    program = start("idle")
    log = program.scratch.parent / f"monarch_log_{program.scratch.name}.log"  # in a folder of /tmp, as Monarch does
    log.touch()
    program.process.kill()
    program.wait()
    program.wait_until_clean(log)


def test_simultaneous_signals_count_as_one(start: Callable[..., Program]):
    program = start("idle")
    for number in STOPS:  # as `timeout` sends to the process and to its group
        program.process.send_signal(number)
    assert program.line() == "stopping"
    program.say("saved")
    assert program.line() == "ended in order"


def test_blocked_event_loop_is_reported(start: Callable[..., Program]):
    program = start("sleep")
    program.process.send_signal(signal.SIGTERM)
    assert program.stderr_line() == "titan-rl: SIGTERM: stopping in order"
    assert "nothing has been stopped for 0.5 s" in program.stderr_line()


def test_ignored_sigint_stays_ignored_and_sigterm_stops(start: Callable[..., Program]):
    program = start("idle", sigint=signal.SIG_IGN)
    program.process.send_signal(signal.SIGINT)
    program.process.send_signal(signal.SIGTERM)
    assert program.stderr_line() == "titan-rl: SIGTERM: stopping in order"
    program.say("saved")
    assert program.wait() == 0


def test_ignored_sighup_stays_ignored(start: Callable[..., Program]):
    program = start("idle", sighup=signal.SIG_IGN)
    program.process.send_signal(signal.SIGHUP)
    time.sleep(0.1)  # signals that are pending together arrive in the order of their numbers
    program.process.send_signal(signal.SIGTERM)
    assert program.stderr_line() == "titan-rl: SIGTERM: stopping in order"
    program.say("saved")
    assert program.wait() == 0


@pytest.mark.parametrize("what", ["idle", "native"])
def test_second_sighup_does_not_end_the_program(start: Callable[..., Program], what: str):
    program = start(what)
    program.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    program.process.send_signal(signal.SIGHUP)
    if what == "native":
        time.sleep(GRACE_S + 0.5)
        assert program.process.poll() is None, "the guard would have killed it"
    else:
        assert program.line() == "stopping"
        program.say("saved")
        assert program.wait() == 0


def test_sighup_is_ignored_after_the_stop_that_it_has_caused() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with StopSignals("stopping", "ended", reaction_s=60):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopSignals("stopping", "ended"):
            pass
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_stop_during_setup_does_not_mention_a_training_step(project: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SETTING_UP], capture_output=True, text=True, timeout=HANG_S, cwd=project
    )
    assert ended.returncode == 130, ended.stderr
    assert "SIGINT: stopping: the run is still being set up" in ended.stderr
    assert "being trained" not in ended.stderr
    assert "stopped before a step was trained; to continue: titan-rl train --resume" in ended.stderr


def test_stop_message_can_change_while_running() -> None:
    messages: list[str] = []

    class Listener(StderrConsole):
        def end_with(self, text: str) -> None:
            messages.append(text)

    with StopSignals("at first", "ended", Listener(), reaction_s=60) as signals:
        signals.stopping = "later"
        signal.raise_signal(signal.SIGTERM)
    assert messages == ["SIGTERM: later"]


def test_guard_survives_a_signal_to_the_whole_job(start: Callable[..., Program]) -> None:
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
