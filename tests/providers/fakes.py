"""Fake commands of ssh, Slurm and Kubernetes, as files on PATH."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

WORKER = """
import signal, sys
address = sys.argv[sys.argv.index("--listen") + 1]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before it reports its address, so that no signal is lost
print("titan-rl: listening on " + address, flush=True)
signal.sigwait({signal.SIGTERM})
print("got SIGTERM", flush=True)
sys.exit(143)
"""
"""Fake `titan-rl worker --listen ADDRESS`, as far as a provider can tell."""


class Commands:
    """Makes commands in a folder at the front of PATH. Each first records its arguments and input."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "bin"
        self._folder.mkdir()
        self._notes = folder / "notes"
        self._notes.mkdir()
        monkeypatch.setenv("PATH", f"{self._folder}:{os.environ['PATH']}")

    def make(self, name: str, does: str, *, reads: bool = False) -> str:
        """Make a command, and return its path.

        Args:
            does: Python code of the command, which can use `argv`.
            reads: Whether the command reads its input to the end.
        """
        path = self._folder / name
        path.write_text(
            f"#!{sys.executable} -S\nimport json, os, pathlib, sys\nargv = sys.argv\n"
            f"given = sys.stdin.read() if {reads} else ''\n"
            f"note = pathlib.Path({str(self._notes)!r}) / f'{{os.getpid()}}.json'\n"
            f"note.write_text(json.dumps([{name!r}, argv[1:], given]))\n{does}"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def calls(self, name: str) -> list[tuple[list[str], str]]:
        """(arguments, input) of each call of a command."""
        notes = [json.loads(path.read_text()) for path in sorted(self._notes.iterdir(), key=os.path.getmtime)]
        return [(arguments, given) for called, arguments, given in notes if called == name]


def worker_command(folder: Path, program: str = WORKER) -> str:
    """Value of `hosts.command` that runs `program`."""
    path = folder / "worker.py"
    path.write_text(program)
    return f"{sys.executable} -S {path}"
