"""What a command prints, where nobody reads it or the disk is full: in programs of their own, to their very end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRY_RUN = ["train", "config.toml", "--dry-run"]
HELP = ["train", "--help"]


def command(arguments: list[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "titan_rl.cli.main", *arguments]
    return subprocess.run(program, **({"stderr": subprocess.PIPE} | streams), text=True, timeout=300, check=False)


@pytest.mark.parametrize("arguments", [DRY_RUN, HELP])
def test_a_full_disk_is_said_in_one_line(project: Path, arguments: list[str]):
    with open("/dev/full", "w") as full:
        ended = command(arguments, stdout=full)
    assert ended.stderr == "titan-rl: the output cannot be written: No space left on device\n"
    assert ended.returncode == 1


@pytest.mark.parametrize("arguments", [DRY_RUN, HELP])
def test_a_reader_that_has_gone_ends_the_command_without_a_word(project: Path, arguments: list[str]):
    read, write = os.pipe()
    os.close(read)
    ended = command(arguments, stdout=write)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [[*DRY_RUN, "--training.stepz", "9"], ["sing"]])
def test_an_error_that_nobody_hears_has_its_exit_code_still(project: Path, arguments: list[str]):
    with open("/dev/full", "w") as full:
        assert command(arguments, stdout=full, stderr=full).returncode == 2


def test_a_command_that_is_started_without_standard_output_prints_nothing(project: Path):
    ended = command(DRY_RUN, preexec_fn=lambda: os.close(1))
    assert ended.returncode == 0
    assert "\necho: the first prompt has " in ended.stderr
