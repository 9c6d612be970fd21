"""Commands that run a worker and end with the process that started them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from background import HANG_S
from providers.fakes import Commands, worker_command

from titan_rl.cluster.providers.host_worker_commands import WorkerProcess, tethered
from titan_rl.core.console import LOG


def test_tethered_command_ends_when_its_starter_is_killed(tmp_path: Path):
    starts = (
        "import subprocess, sys, signal\n"
        "child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "signal.pause()\n"
    )
    command = tethered([*worker_command(tmp_path).split(), "--listen", "10.0.0.1:5"])
    starter = subprocess.Popen([sys.executable, "-c", starts, *command], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    assert starter.stdout.readline() == "titan-rl: listening on 10.0.0.1:5\n"
    starter.kill()
    assert starter.stdout.read() == "got SIGTERM\n"  # end of file: no other process holds the pipe
    assert starter.wait(HANG_S) == -signal.SIGKILL


def test_tethered_command_starts_in_an_existing_folder(tmp_path: Path):
    for folder, expected in ((str(tmp_path), str(tmp_path)), (str(tmp_path / "not here"), os.getcwd())):
        with subprocess.Popen(
            tethered(["pwd"], folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == expected


async def test_closed_ssh_connection_is_not_reported_as_a_worker_exit(tmp_path: Path, commands: Commands):
    prints = 'print("titan-rl: listening on 10.0.0.2:700\\nMonarch logs somewhere")'
    commands.make("ssh", f"{prints}\nsys.exit(255)\n")
    for word, ended in (
        ("ssh", r"^ssh's connection to gpu-2, of the worker at 10.0.0.2:700, has ended; see .*gpu-2.log$"),
        (commands.make("other", f"{prints}\nsys.exit(255)\n"), "^the worker on gpu-2 has ended with code 255: Monarch"),
    ):
        process = WorkerProcess("gpu-2", [word], tmp_path / "worker-gpu-2.log", LOG)
        await process.start()
        assert re.search(ended, await process.ended())
        await process.end()
