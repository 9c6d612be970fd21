"""Rewards that hold Python's global interpreter lock: each is named, and ends when its time is up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from background import HANG_S
from depth import in_depth
from user_project import project

from titan_rl.core.run_files import read_status

__all__ = ["project"]

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, itertools, re, sys, time
from pathlib import Path
from titan_rl import Reward, Rollout
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.errors import RewardError
from titan_rl.run.process.guard import guarded
from titan_rl.run.process.signals import StopSignals, run_to_its_end
from titan_rl.run.status import status_kept

def backtracks(rollout):
    try:
        re.match(r"(a+)+$", "a" * 40 + "b")
    except Exception:
        return 0.0

def swallows(rollout):
    try:
        re.match(r"(a+)+$", "a" * 40 + "b")
    except BaseException:
        return 0.0

def sleeps(rollout):
    time.sleep(1000)

def insists(rollout):
    while True:
        try:
            while True:
                try: re.match(r"(a+)+$", "a" * 40 + "b")
                except BaseException: pass
        except BaseException: pass  # an interruption between two matches

def dozes(rollout):
    while True:
        try:
            while True:
                try: time.sleep(1000)
                except BaseException: pass
        except BaseException: pass

def computes(rollout):
    pass
    return sum(itertools.repeat(1))

async def judge(signals, fn, where, limit_s):
    with LoopWatchdog(), signals.ending_in_order():
        print("ready", flush=True)
        reward = Reward(globals()[fn], in_thread=where == "thread", timeout_s=float(limit_s))
        try:
            await reward.values([Rollout("g/0", "g", 0, None)])
        except RewardError as error:
            print(error, flush=True)

run = Path(sys.argv[1])
with status_kept(run, begins=True) as status, StopSignals("stopping", "ended") as signals:
    with guarded(run, "no-run", "no advice", run):
        run_to_its_end(judge(signals, *sys.argv[2:]))
    status.state = "stopped" if signals.code else "finished"
sys.exit(signals.code)
"""


LINES = {
    fn: PROGRAM.splitlines().index(f"def {fn}(rollout):") + {"sleeps": 2, "insists": 5, "dozes": 5}.get(fn, 3)
    for fn in ("backtracks", "swallows", "sleeps", "insists", "dozes", "computes")
}


def judge(tmp_path: Path, fn: str, where: str = "loop") -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", tmp_path, fn, where, "6"]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)


@pytest.mark.parametrize("fn", ["swallows", *(pytest.param(each, marks=in_depth) for each in ("backtracks", "sleeps"))])
def test_late_reward_of_the_main_thread_fails_even_if_it_catches_its_interruption(tmp_path: Path, fn: str) -> None:
    ended = judge(tmp_path, fn)
    assert ended.returncode == 0, ended.stderr
    assert f"reward '{fn}' took longer than 6 s on rollout 'g/0'" in ended.stdout
    assert f"(program.py:{LINES[fn]} in {fn})" in ended.stdout
    if fn != "sleeps":
        assert f"titan-rl: program.py:{LINES[fn]} in {fn} has held Python's interpreter lock (GIL) for" in ended.stderr


@pytest.mark.parametrize(("fn", "where"), [("backtracks", "thread"), pytest.param("computes", "loop", marks=in_depth)])
def test_late_reward_that_cannot_be_interrupted_ends_the_process_and_is_named(
    tmp_path: Path, fn: str, where: str
) -> None:
    ended = judge(tmp_path, fn, where)
    assert ended.returncode == -signal.SIGKILL
    line = f"program.py:{LINES[fn]} in {fn} has held Python's interpreter lock (GIL) for"
    assert f"titan-rl: {line}" in ended.stderr
    assert "longer than its limit of 6 s; the run is killed; no advice" in ended.stderr
    status = read_status(tmp_path)
    assert status.state == "failed"
    assert status.reason.startswith(line)


@pytest.mark.parametrize("fn", ["insists", pytest.param("dozes", marks=in_depth)])
def test_late_reward_that_goes_on_after_its_interruptions_ends_the_process(tmp_path: Path, fn: str) -> None:
    ended = judge(tmp_path, fn)
    assert ended.returncode == -signal.SIGKILL
    line = f"program.py:{LINES[fn]} in {fn} goes on after its interruption"
    assert f"titan-rl: {line}" in ended.stderr
    assert read_status(tmp_path).reason.startswith(line)


@pytest.mark.parametrize(
    ("fn", "where", "code"),
    [
        ("computes", "loop", -signal.SIGKILL),
        pytest.param("backtracks", "thread", -signal.SIGKILL, marks=in_depth),
        ("backtracks", "loop", 143),
    ],
)
def test_one_signal_ends_a_held_process_within_seconds_whatever_the_limit_of_the_call(
    tmp_path: Path, fn: str, where: str, code: int
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", tmp_path, fn, where, "9999"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            errors = process.communicate(timeout=HANG_S)[1]
        finally:
            process.kill()
    assert process.returncode == code, errors
    assert f"program.py:{LINES[fn]} in {fn} has held Python's interpreter lock (GIL) for" in errors
    assert read_status(tmp_path).state == "stopped"


DRY_RUN = """
import re
from titan_rl import MessageObservation, MessageStep, MessageTask, Reward, RolloutStatus, Rubric

WHERE = "loop"

class Env:
    async def reset(self): return MessageObservation([{"role": "user", "content": "Say it."}])
    async def step(self, message):
        if WHERE == "step": backtracks(None)
        return MessageStep(status=RolloutStatus.COMPLETED)
    async def close(self): ...

class Holds(MessageTask):
    def sample(self, rng): return rng.randint(0, 999)
    def env(self, sample): return Env()
    def rubric(self): return Rubric([Reward(backtracks, in_thread=WHERE == "thread")])

def backtracks(rollout):
    while True:
        try:
            while True:
                try: re.match(r"(a+)+$", "a" * 40 + "b")
                except BaseException: pass
        except BaseException: pass  # an interruption between two matches
"""


@pytest.mark.parametrize("where", ["thread", *(pytest.param(each, marks=in_depth) for each in ("loop", "step"))])
def test_held_dry_run_is_ended_and_names_task_and_remedy(project: Path, where: str) -> None:
    (project / "holds.py").write_text(DRY_RUN.replace('"loop"', f'"{where}"'))
    (project / "holds.toml").write_text('[model]\npath = "policy"\n[task]\ntype = "holds:Holds"\n')
    program = "import sys; from titan_rl.cli.main import main; sys.exit(main(['train', 'holds.toml', '--dry-run']))"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=project)
    assert ended.returncode == -signal.SIGKILL
    line = DRY_RUN.splitlines().index("def backtracks(rollout):") + 5
    assert f"holds.py:{line} in backtracks" in ended.stderr
    assert "task 'holds', train_sample(0, 0): not ready" in ended.stderr
    assert "start it again" not in ended.stderr


ALARM = """
import asyncio, signal
from titan_rl import FailurePolicy, Reward, Rollout
from titan_rl.core.errors import RewardError

def alarmed(rollout):
    try:
        signal.signal(signal.SIGALRM, lambda number, frame: None)
    except Exception:
        return 0.0
    return 1.0

async def judge(in_thread):
    reward = Reward(alarmed, in_thread=in_thread, on_failure=FailurePolicy(retries=0))
    try:
        print(await reward.values([Rollout("g/0", "g", 0, None)]))
    except RewardError as error:
        print(error)

asyncio.run(judge(False))
asyncio.run(judge(True))
"""


def test_signals_in_a_thread_fail_a_reward_that_hides_the_error(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ALARM)
    command = [sys.executable, "program.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)
    in_main, in_thread = ended.stdout.splitlines()
    assert in_main == "[1.0]"
    assert "reward 'alarmed' failed on rollout 'g/0': RuntimeError: it uses signals" in in_thread
    assert "math_verify: parsing_timeout=None" in in_thread
    line = ALARM.splitlines().index("    try:") + 2
    assert f"(program.py:{line} in alarmed)" in in_thread
