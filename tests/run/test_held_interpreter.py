"""Rewards that hold Python's global interpreter lock: each is named, and ends when its time is up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from background import HANG_S

from titan_rl.core.run_files import read_status

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

def computes(rollout):
    pass
    return sum(itertools.repeat(1))

async def judge(fn, in_thread):
    with LoopWatchdog():
        print("ready", flush=True)
        try:
            await Reward(globals()[fn], in_thread=in_thread, timeout_s=6.0).values([Rollout("g/0", "g", 0, None)])
        except RewardError as error:
            print(error, flush=True)

run = Path(sys.argv[1])
with status_kept(run, begins=True), StopSignals("stopping", "ended"), guarded(run, "no-run", "no advice", run):
    run_to_its_end(judge(sys.argv[2], sys.argv[3:] == ["thread"]))
"""


LINES = {
    fn: PROGRAM.splitlines().index(f"def {fn}(rollout):") + (2 if fn == "sleeps" else 3)
    for fn in ("backtracks", "swallows", "sleeps", "computes")
}


def judge(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", tmp_path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)


@pytest.mark.parametrize("fn", ["backtracks", "swallows", "sleeps"])
def test_late_reward_of_the_main_thread_fails_even_if_it_catches_its_interruption(tmp_path: Path, fn: str) -> None:
    ended = judge(tmp_path, fn)
    assert ended.returncode == 0, ended.stderr
    assert f"reward '{fn}' took longer than 6 s on rollout 'g/0'" in ended.stdout
    assert f"(program.py:{LINES[fn]} in {fn})" in ended.stdout
    if fn != "sleeps":
        assert f"titan-rl: program.py:{LINES[fn]} in {fn} has held Python's interpreter lock (GIL) for" in ended.stderr


@pytest.mark.parametrize(("fn", "where"), [("backtracks", ["thread"]), ("computes", [])])
def test_late_reward_that_cannot_be_interrupted_ends_the_process_and_is_named(
    tmp_path: Path, fn: str, where: list[str]
) -> None:
    ended = judge(tmp_path, fn, *where)
    assert ended.returncode == -signal.SIGKILL
    line = f"program.py:{LINES[fn]} in {fn} has held Python's interpreter lock (GIL) for"
    assert f"titan-rl: {line}" in ended.stderr
    assert "longer than its limit of 6 s; the run is killed; no advice" in ended.stderr
    status = read_status(tmp_path)
    assert status.state == "failed"
    assert status.reason.startswith(line)


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
