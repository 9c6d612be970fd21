"""The minimal example trains on real generations in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

from e2e.runs import RUN_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal.py"


def test_minimal_example_trains_for_two_steps() -> None:
    command = [sys.executable, "-m", "examples.minimal", "--steps=2", "--groups-per-step=4", "--group-size=4"]
    run = subprocess.run(
        command,
        cwd=EXAMPLE.parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    steps = re.findall(r"^step (\d)/2  reward (\S+)  tokens (\d+)  loss (\S+)", run.stdout, re.MULTILINE)
    assert [step for step, *_ in steps] == ["1", "2"]
    for _, reward, tokens, _ in steps:
        assert 0 < float(reward) < 1
        assert int(tokens) > 16


def test_minimal_example_is_at_most_120_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 120
