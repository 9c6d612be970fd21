"""Several runs in one process, as in a notebook, where Monarch starts only once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from background import HANG_S

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

PROGRAM = """
import asyncio, os
from titan_rl.run.process.environment import process_scratch, run_environment
from titan_rl.cluster.processes.sockets import listen_below
from monarch.actor import Actor, endpoint, this_host

class Child(Actor):
    @endpoint
    async def variables(self):
        return os.environ["TMPDIR"], os.environ["PYTHONPATH"].split(os.pathsep)[0]

async def run():
    listen_below(process_scratch())
    processes = this_host().spawn_procs({"procs": 1}, name="child")
    seen = await processes.spawn("child", Child).variables.call_one()
    await processes.stop()
    return seen

for modules in ("/of/the/first", "/of/the/second"):
    with run_environment([modules]):
        assert asyncio.run(run()) == (os.environ["TMPDIR"], modules)
print(process_scratch())
"""


def test_second_run_in_a_process_starts_new_processes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.splitlines()[-1]).exists()
