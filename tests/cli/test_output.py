"""Commands whose output cannot be written: a full disk, a closed pipe, no standard output. Each runs as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titan_rl.evaluation.results import Evaluation, task_result

DRY_RUN = ["train", "config.toml", "--dry-run"]
HELP = ["train", "--help"]


def command(arguments: list[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "titan_rl.cli.main", *arguments]
    return subprocess.run(program, **({"stderr": subprocess.PIPE} | streams), text=True, timeout=300, check=False)


@pytest.mark.parametrize("arguments", [DRY_RUN, HELP])
def test_full_disk_is_reported_in_one_line(project: Path, arguments: list[str]):
    with open("/dev/full", "w") as full:
        ended = command(arguments, stdout=full)
    assert ended.stderr == "titan-rl: the output cannot be written: No space left on device\n"
    assert ended.returncode == 1


@pytest.mark.parametrize("arguments", [DRY_RUN, HELP])
def test_closed_pipe_ends_the_command_silently(project: Path, arguments: list[str]):
    read, write = os.pipe()
    os.close(read)
    ended = command(arguments, stdout=write)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [[*DRY_RUN, "--training.stepz", "9"], ["sing"]])
def test_exit_code_survives_unwritable_streams(project: Path, arguments: list[str]):
    with open("/dev/full", "w") as full:
        assert command(arguments, stdout=full, stderr=full).returncode == 2


def test_characters_that_the_output_cannot_encode_become_escapes(tmp_path: Path):
    record = {"task": "sums", "prompt": 0, "prompt_digest": "d", "sibling": 0, "status": "completed", "turns": [[]]}
    given = {"metrics": {}, "num_completion_tokens": 1, "error": None, "reward_breakdown": {}}
    records = [
        {**record, **given, "prompt": index, "prompt_id": f"p{index}", "reward": float(index)} for index in range(2)
    ]
    result = task_result(records, samples_per_prompt=1, success=1.0)
    Evaluation("the policy", 0, {"sums": result}, 1.0, folder=tmp_path).write()
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = command(["eval", "--compare", str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert r"0.500 \xb1 0.500" in ended.stdout


def test_command_runs_without_standard_output(project: Path):
    ended = command(DRY_RUN, preexec_fn=lambda: os.close(1))
    assert ended.returncode == 0
    assert "\necho: the first prompt has " in ended.stderr
