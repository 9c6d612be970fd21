"""SIGTERM in a process of a run, which a scheduler sends to all processes of a job."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

PROGRAM = """
import multiprocessing, os, signal, subprocess, sys, threading, time
from titan_rl.cluster.processes.process import enter_actor_process

given = os.dup(1)
entering = threading.Thread(target=enter_actor_process, args=(sys.argv[1],))  # Monarch has the main thread
entering.start()
entering.join()
os.kill(os.getpid(), signal.SIGTERM)
program = subprocess.Popen(["sleep", "1000"])
program.terminate()
context = multiprocessing.get_context("fork")
runs = context.Event()
fork = context.Process(target=lambda: (runs.set(), time.sleep(1000)))
fork.start()
runs.wait()
fork.terminate()
fork.join()
os.write(given, f"{program.wait()} {fork.exitcode}".encode())
"""


def test_actor_process_ignores_sigterm_but_its_children_do_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{-signal.SIGTERM} {-signal.SIGTERM}"
    assert (tmp_path / "log").read_text() == ""
