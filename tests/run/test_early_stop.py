"""Ctrl-C while a run imports the modules that start its processes, in a separate program: no process is started."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from background import HANG_S
from user_project import project

if importlib.util.find_spec("vllm") is None:  # the command requires vllm; this test does not import it
    pytest.skip("needs the cpu or gpu extra", allow_module_level=True)

__all__ = ["project"]

PROGRAM = """
import importlib.machinery, os, signal, sys

class StartProcesses:
    # Import hook that replaces titan_rl.cluster.run_processes.

    def find_spec(self, name, path, target=None):
        if name == "titan_rl.cluster.run_processes":
            os.kill(os.getpid(), signal.SIGINT)  # while it is imported
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.start_processes = lambda *args, **parts: sys.exit("started")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
sys.meta_path.insert(0, StartProcesses())
from titan_rl.cli.main import main
sys.exit(main(["train", "config.toml"]))
"""


def test_interrupt_during_startup_starts_no_processes(project: Path):
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 130, ended.stderr
    assert ended.stdout == ""
    first, last = ended.stderr.splitlines()
    assert first.startswith("titan-rl: SIGINT: stopping: ")
    (run,) = [path for path in (project / "runs").iterdir() if not path.is_symlink()]
    assert last == f"titan-rl: stopped before a step was trained; to continue: titan-rl train --resume {run}"
