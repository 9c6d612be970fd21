"""Agents of a killed run, which are replayed from the start with the recorded answers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from background import HANG_S
from killed import play

from titan_rl import RolloutGroup, RolloutStatus
from titan_rl.tasks.agents.reaper import VARIABLE

pytestmark = pytest.mark.slow


def tokens(group: RolloutGroup) -> list[list[list[int]]]:
    return [[list(turn.completion.token_ids) for turn in rollout.turns] for rollout in group.rollouts]


def agents_of(folder: Path) -> list[int]:
    """Processes that are marked as agents and whose current folder is below `folder`."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and VARIABLE.encode() in (process / "environ").read_bytes():
                found += [int(process.name)] if (process / "cwd").resolve().is_relative_to(folder) else []
        except OSError:  # it has ended
            continue
    return found


def test_resumed_run_replays_agents_without_resampling(tmp_path: Path) -> None:
    undisturbed, all_asked = asyncio.run(play(tmp_path / "undisturbed"))
    folder = tmp_path / "killed"
    program = [sys.executable, str(Path(__file__).with_name("killed.py")), str(folder), "3"]
    ended = subprocess.run(
        program, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=300, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + HANG_S  # their reaper outlives the run briefly
    while agents_of(folder):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    resumed, asked = asyncio.run(play(folder))
    assert all(rollout.status is RolloutStatus.COMPLETED for rollout in resumed.rollouts)
    assert tokens(resumed) == tokens(undisturbed)
    assert set(asked) < set(all_asked)
    assert len(asked) < len(all_asked)
