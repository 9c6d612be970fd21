from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from titan_rl.core.errors import NoSpaceError
from titan_rl.training.state.checkpoint import atomic_directory, keep_last, latest, list_checkpoints, step_directory


def write(path: Path, text: str) -> None:
    with atomic_directory(path) as temporary:
        (temporary / "data").write_text(text)


def test_atomic_directory_replaces_the_previous_folder(tmp_path: Path):
    path = tmp_path / "new" / "step-000001"
    write(path, "first")
    write(path, "second")
    assert (path / "data").read_text() == "second"
    assert os.listdir(path.parent) == ["step-000001"]


def test_full_disk_keeps_the_previous_folder(tmp_path: Path):
    path = tmp_path / "step-000001"
    write(path, "first")

    def write_until_full() -> None:
        with atomic_directory(path) as temporary:
            (temporary / "data").write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(NoSpaceError, match="no space left"):
        write_until_full()
    assert (path / "data").read_text() == "first"
    assert os.listdir(tmp_path) == ["step-000001"]


def test_keyboard_interrupt_propagates_and_leaves_no_files(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "step-000001"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path):
    (tmp_path / ".step-000001.tmp").mkdir()
    (tmp_path / ".step-000001.tmp" / "half").touch()
    write(tmp_path / "step-000001", "whole")
    assert os.listdir(tmp_path) == ["step-000001"]
    assert os.listdir(tmp_path / "step-000001") == ["data"]


def test_keep_last_keeps_the_highest_steps(tmp_path: Path):
    assert latest(tmp_path / "absent") is None
    for step in (900, 1000000, 20):
        write(step_directory(tmp_path, step), "")
    (tmp_path / ".step-2000000.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    keep_last(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000900", "step-1000000"]
    assert latest(tmp_path) == tmp_path / "step-1000000"
