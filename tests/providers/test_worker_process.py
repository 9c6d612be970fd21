"""Workers that are started by a command here end with the block, and with the process that started them."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from providers.fakes import worker_command

from titan_rl.errors import ProviderError
from titan_rl.providers.worker_process import tethered, worker_processes

LIMIT_S = 60.0


def listening(tmp_path: Path, *addresses: str, program: str | None = None):
    command = worker_command(tmp_path, *([program] if program else [])).split()
    return [(f"host{i}", tethered([*command, "--listen", address])) for i, address in enumerate(addresses)]


async def test_workers_listen_for_as_long_as_the_block(tmp_path: Path):
    told = list[str]()
    commands = listening(tmp_path, "10.0.0.1:5", "10.0.0.2:6")
    async with worker_processes(commands, tmp_path, told.append, LIMIT_S) as addresses:
        assert addresses == ["10.0.0.1:5", "10.0.0.2:6"]
    log = (tmp_path / "worker-host1.log").read_text().splitlines()
    assert log == ["titan-rl: listening on 10.0.0.2:6", "told to end"]
    assert told == []


async def test_a_worker_that_does_not_come_up_fails_all_with_its_last_words(tmp_path: Path):
    well = listening(tmp_path, "10.0.0.1:5")
    waits = f"import os\nwhile not os.path.getsize({str(tmp_path / 'worker-host0.log')!r}): pass\n"
    fails = "print('warming up')\nraise SystemExit('no such interface')"
    ill = ("host1", [sys.executable, "-S", "-c", waits + fails])
    with pytest.raises(ProviderError, match=r"host1 has ended with code 1: no such interface; its log: .*worker-host1"):
        async with worker_processes([*well, ill], tmp_path, print, LIMIT_S):
            pytest.fail("it began")
    assert (tmp_path / "worker-host0.log").read_text().endswith("told to end\n")


async def test_one_that_never_listens_is_waited_for_in_vain_and_ended(tmp_path: Path):
    commands = listening(tmp_path, "10.0.0.1:5", program="import signal\nsignal.pause()\n")
    with pytest.raises(ProviderError, match=r"no worker listens after 0.1 s on host0; see .*/worker-\*"):
        async with worker_processes(commands, tmp_path, print, wait_s=0.1):
            pytest.fail("it began")


async def test_a_command_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ProviderError, match="no-such-ssh cannot be started: No such file"):
        async with worker_processes([("host", ["no-such-ssh"])], tmp_path, print, LIMIT_S):
            pytest.fail("it began")


async def test_one_that_ends_in_the_block_is_told_of(tmp_path: Path):
    told = asyncio.Queue[str]()
    program = "print('listening on 10.0.0.1:5', flush=True)\nraise SystemExit('out of memory')\n"
    commands = listening(tmp_path, "10.0.0.1:5", program=program)
    async with worker_processes(commands, tmp_path, told.put_nowait, LIMIT_S), asyncio.timeout(LIMIT_S):
        assert await told.get() == "the worker on host0 has ended with code 1: out of memory"


def test_a_tethered_command_ends_with_a_killed_process_that_started_it(tmp_path: Path):
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
    assert starter.stdout.read() == "told to end\n"  # and nobody else has the pipe any more
    assert starter.wait(LIMIT_S) == -signal.SIGKILL


def test_a_tethered_command_begins_in_a_folder_that_is_there(tmp_path: Path):
    for folder, begun in ((str(tmp_path), str(tmp_path)), (str(tmp_path / "not here"), os.getcwd())):
        with subprocess.Popen(
            tethered(["pwd"], folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == begun
