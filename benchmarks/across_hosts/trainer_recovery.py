"""Time without a trainer in a run of the example whose trainer is killed: from the signal until a step is trained.

The trainer is killed four steps after the newest checkpoint, so that these steps are repeated.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.paired import Spread, report
from tests.e2e.runs import process_writing_to
from titan_rl.run.directory import read_jsonl

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "alphabet_sort" / "cpu.toml"
INTERVAL, SINCE = 10, 4
TARGET = 15.0
LIMIT_S = 240.0
END_S = 60.0


def measure(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "latest"
        options = {
            "run_dir": str(Path(name)),
            "training.steps": INTERVAL * (rounds + 1),
            "hosts.max_respawns": rounds,
            "checkpoint.interval": INTERVAL,
            "validation.num_prompts": 0,
        }
        command = [sys.executable, "-m", "titan_rl.cli.main", "train", str(EXAMPLE)]
        command += [word for option, value in options.items() for word in (f"--{option}", str(value))]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=sys.stderr)
        try:
            away = [_kill(run, process, INTERVAL * (round_ + 1) + SINCE) for round_ in range(rounds)]
            recovered = [step["train/recovery_s"] for step in _steps(run) if "train/recovery_s" in step]
        finally:
            _end(process)
    report("trainer_recovery_s", Spread(away), "s", TARGET)
    report("trainer_recovery_alone_s", Spread(recovered), "s")


def _kill(run: Path, process: subprocess.Popen[bytes], step: int) -> float:
    """Seconds from the death after a step until the first step after it."""
    _until(lambda: _last(run) >= step, process)
    pid, before = process_writing_to(run / "logs" / "trainer.log"), _last(run)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _until(lambda: any(r["step"] > before and "train/recovery_s" in r for r in _steps(run)), process)
    return time.monotonic() - began


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the run makes no progress")
        time.sleep(0.05)


def _last(run: Path) -> int:
    return max((int(record["step"]) for record in _steps(run)), default=0)


def _steps(run: Path) -> list[dict[str, float]]:
    return [record for record in read_jsonl(run / "metrics.jsonl") if "train/loss" in record]
