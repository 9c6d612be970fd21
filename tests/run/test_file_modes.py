"""Permissions of a run's files, and run directories that cannot be created."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from user_project import project

from titan_rl.config.load import load_config
from titan_rl.core.errors import ConfigError
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.process.environment import file_modes
from titan_rl.training.state.checkpoint import atomic_directory
from titan_rl.weights.shard_files import OwnedFolder, ShardFile

__all__ = ["project"]


@pytest.fixture(params=[0o022, 0o000], ids=["umask 022", "umask 0"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    assert os.umask(before) == request.param, "the umask is restored when the run ends"


def write_run_files(root: Path) -> None:
    """Write every kind of file of a run below `root`, one of them from a child process."""
    run_dir = RunDirectory.create(load_config("config.toml", [("run_dir", str(root / "runs"))]))
    with run_dir.locked():
        run_dir.write_metrics(1, {"loss": 0.5})
        run_dir.write_rollout({"step": 1})
        RunJournal(run_dir.journal).close()
        with atomic_directory(run_dir.checkpoints / "step-000001") as folder:
            (folder / "state.json").write_text("{}")
        script = f"open({str(run_dir.logs / 'generator-0.log')!r}, 'w')"
        subprocess.run([sys.executable, "-c", script], check=True)
    run_dir.close()
    scratch = OwnedFolder("scratch-", root)
    shard = ShardFile(scratch.path / "1", 64)
    shard.publish(scratch.path / "2")


def modes(root: Path) -> dict[str, int]:
    found = [path for path in root.rglob("*") if not path.is_symlink()]
    assert len(found) >= 14
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in found}


def test_run_files_are_private_by_default(project: Path, umask: int):
    (project / "out").mkdir()
    with file_modes(share=False):
        write_run_files(project / "out")
    assert not {path: oct(mode) for path, mode in modes(project / "out").items() if mode & 0o077}


def test_shared_run_follows_the_umask_except_for_shared_memory(project: Path, umask: int):
    (project / "out").mkdir()
    with file_modes(share=True):
        write_run_files(project / "out")
    for path, mode in modes(project / "out").items():
        everybody = 0o777 if (project / "out" / path).is_dir() else 0o666
        expected = everybody & (0o700 if path.startswith("scratch-") else ~umask)
        assert mode == expected, path


@pytest.mark.parametrize(
    ("run_dir", "complaint"),
    [
        ("config.toml", "is a file; name a folder"),
        ("config.toml/below/it", "is a file; name a folder"),
        ("/proc/runs", "no run can be created there, /proc/runs: .*; name a folder that you may write to"),
    ],
)
def test_unusable_run_dir_raises_config_error(project: Path, run_dir: str, complaint: str):
    config = load_config("config.toml", [("run_dir", run_dir)])
    with pytest.raises(ConfigError, match=f"run_dir = '{run_dir}'.*{complaint}"):
        RunDirectory.create(config)


def test_run_directory_is_independent_of_the_working_directory(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDirectory.create(load_config("config.toml", [("run_dir", "runs")]))
    monkeypatch.chdir(tmp_path_factory.mktemp("sandbox"))
    run_dir.write_metrics(1, {"loss": 0.5})
    assert run_dir.metrics.is_relative_to(project)
    assert "loss" in run_dir.metrics.read_text()
