"""Scratch folders of runs, which cleaners of temporary files leave alone."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import pytest

from titan_rl.cluster.hosts import folders
from titan_rl.cluster.hosts.folders import make_scratch, make_young


def test_scratch_folder_has_the_lock_by_which_systemd_tmpfiles_knows_it_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(folders, "scratch_root", lambda: tmp_path)
    folder = make_scratch()
    descriptor = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.remove()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_everything_in_a_scratch_folder_is_made_young_for_cleaners_that_go_by_age(tmp_path: Path):
    inside = tmp_path / "servers"
    inside.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        (inside / "link").symlink_to(tmp_path / "nowhere")
        (inside / "file").write_text("")
        paths = [tmp_path, inside, tmp_path / "socket", inside / "file", inside / "link"]
        for path in paths:
            os.utime(path, (0, 0), follow_symlinks=False)
        began = time.time()
        make_young(tmp_path)
        for path in paths:
            status = path.lstat()
            assert min(status.st_atime, status.st_mtime) > began - 1, path
