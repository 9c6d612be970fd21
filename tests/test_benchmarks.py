"""Benchmarks leave nothing behind, and `benchmarks.all` accepts what it can run."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.all import main, measure
from benchmarks.processes import end
from tests.background import HANG_S


def session(script: str) -> subprocess.Popen[str]:
    """Start a shell in its own session."""
    return subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)


def has_ended(process: int) -> bool:
    """Whether the process of a file descriptor has ended, or does so now."""
    return bool(select.select([process], [], [], HANG_S)[0])


def test_end_lets_a_child_shut_down():
    with session("(trap 'echo shut down; exit' TERM; echo ready; sleep 600 & wait) & wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        end(process.pid, HANG_S)
        assert process.stdout.read() == "shut down\n"


def test_end_kills_what_ignores_a_signal_in_any_session():
    with session("trap '' TERM; setsid sh -c 'echo $$; exec sleep 600' & echo $$; wait") as process:
        assert process.stdout is not None
        running = [os.pidfd_open(int(process.stdout.readline())) for _ in range(2)]
        end(process.pid, 0.1)
        assert all(has_ended(each) for each in running)
    for each in running:
        os.close(each)


def test_failed_benchmark_leaves_no_process_and_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "failing.py").write_text(
        "import subprocess, sys, tempfile\n"
        "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
        "open('left', 'w').write(f'{child.pid} {tempfile.mkdtemp()}')\n"
        "sys.exit(1)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        measure("failing", HANG_S)
    child, folder = Path("left").read_text().split()
    assert not Path(folder).parent.exists()
    stat = Path("/proc", child, "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--only", "foo"], "router"), (["--minutes", "0"], "number above 0"), (["--minutes=-1"], "number above 0")],
)
def test_benchmarks_that_cannot_run_are_refused(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["all", *given])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in capsys.readouterr().err
