import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from background import HANG_S
from cluster import forked_program

from titan_rl.cluster.processes import fork_server
from titan_rl.config.load import load_config

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="fork servers need Linux")


class Server:
    """Fork server of `forked_program`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.path = folder / "generator"
        self.folder = folder
        command = [sys.executable, forked_program.__file__, str(self.path), *options]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "listens\n"
        self.is_ready = asyncio.run(fork_server.wait_until_ready(folder, "generator"))

    def launch(self, **environment: str) -> subprocess.Popen[str]:
        """Start a launcher. Without a server it runs Monarch's module, for which a fake one stands in here."""
        package = self.folder / "monarch" / "_src" / "actor"
        package.mkdir(parents=True, exist_ok=True)
        for folder in (package, package.parent, package.parent.parent):
            (folder / "__init__.py").touch()
        (package / "bootstrap_main.py").write_text("print('as Monarch does')")
        return subprocess.Popen(
            [sys.executable, "-I", "-S", fork_server.__file__, "launch", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={"PYTHONPATH": str(self.folder), **environment},
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    assert server.is_ready
    yield server
    server.process.kill()
    server.process.wait(HANG_S)


def first_line(launcher: subprocess.Popen[str]) -> str:
    assert launcher.stdout is not None
    return launcher.stdout.readline()


def pid_of(launcher: subprocess.Popen[str]) -> int:
    return json.loads(first_line(launcher))[0]


def wait_for_end(pid: int) -> None:
    """Wait until a process that is no child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(HANG_S * 1000), "it is still running"
    os.close(descriptor)


def test_forked_process_uses_its_launchers_environment_folder_and_streams(server: Server):
    launcher = server.launch(COLOR="\udce9 blue")
    pid, folder, environment = json.loads(first_line(launcher))
    assert pid not in (launcher.pid, server.process.pid)
    assert folder == str(server.folder)
    assert environment["COLOR"] == "\udce9 blue"
    assert "HOME" not in environment, "the server's environment is replaced, not extended"
    launcher.communicate("7\n", timeout=HANG_S)
    assert launcher.returncode == 7
    another = server.launch()
    another.communicate("0\n", timeout=HANG_S)
    assert another.returncode == 0, "the server still works"


def test_launcher_ends_by_the_signal_that_killed_its_process(server: Server):
    launcher = server.launch()
    os.kill(pid_of(launcher), signal.SIGKILL)
    assert launcher.wait(HANG_S) == -signal.SIGKILL


def test_launcher_ignores_sigterm_and_its_death_ends_its_process(server: Server):
    launcher = server.launch()
    pid = pid_of(launcher)
    launcher.terminate()  # schedulers send it to all processes of a job
    launcher.kill()
    assert launcher.wait(HANG_S) == -signal.SIGKILL
    wait_for_end(pid)


def test_server_death_ends_its_processes_and_later_ones_start_without_it(server: Server):
    launcher = server.launch()
    pid = pid_of(launcher)
    server.process.kill()
    wait_for_end(pid)
    assert launcher.wait(HANG_S) == -signal.SIGKILL
    assert first_line(server.launch()) == "as Monarch does\n"
    assert not asyncio.run(fork_server.wait_until_ready(server.folder / "elsewhere", "generator"))


ORPHANING = """
import signal, subprocess, sys
subprocess.Popen(sys.argv[1:])
signal.pause()
"""


def test_end_of_the_command_that_started_a_launcher_ends_its_process(server: Server):
    """The server belongs to another command, and stays."""
    command = [sys.executable, "-I", "-S", fork_server.__file__, "launch", str(server.path)]
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANING, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        pid = pid_of(starter)
        starter.kill()
        wait_for_end(pid)
    assert server.process.poll() is None


def test_command_that_a_run_starts_uses_the_servers_of_the_run(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(fork_server.SERVERS, f"{sys.prefix}:{server.folder}")
    with fork_server.fork_servers(["generator"]):
        assert fork_server.servers_of_run() == server.folder
    assert server.process.poll() is None, "the run ends its servers"


@pytest.mark.parametrize(
    ("servers", "kinds"),
    [("/other/python:{folder}", ["generator"]), ("{prefix}:{folder}/gone", ["generator"])],
    ids=["another installation", "servers that ended"],
)
def test_command_starts_servers_if_those_of_the_run_cannot_fork_its_processes(
    server: Server, monkeypatch: pytest.MonkeyPatch, servers: str, kinds: list[str]
):
    monkeypatch.setenv(fork_server.SERVERS, servers.format(prefix=sys.prefix, folder=server.folder))
    with fork_server.fork_servers(kinds):
        own = fork_server.servers_of_run()
        assert own not in (None, server.folder)
        assert os.environ[fork_server.SERVERS] == f"{sys.prefix}:{own}", "for the commands that it starts"
    assert fork_server.SERVERS not in os.environ


def test_malformed_and_vanished_clients_do_not_stop_the_server(server: Server):
    for content in (b"", b"\0\0\0\0\0\0\0\5{'a':"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(server.path))
            client.sendall(content)
    launcher = server.launch()
    launcher.communicate("3\n", timeout=HANG_S)
    assert launcher.returncode == 3


def test_server_with_a_thread_does_not_fork(tmp_path: Path):
    server = Server(tmp_path, "thread")
    try:
        assert not server.is_ready
        assert first_line(server.launch()) == "as Monarch does\n"
    finally:
        server.process.kill()
        server.process.wait(HANG_S)


@pytest.mark.parametrize(
    ("settings", "trains", "generates", "kinds"),
    [
        ({}, True, True, ["trainer", "generator"]),
        ({}, True, False, ["trainer"]),
        ({}, False, True, ["generator"]),
        ({"generation.engine": "tests.e2e.own_engine:make"}, True, True, ["trainer"]),
        ({"hosts.addresses": ["gpu-1:22222"]}, True, True, []),
        ({"hosts.provider": "ssh", "hosts.names": ["gpu-1"]}, True, True, []),
    ],
)
def test_forked_kinds_are_local_cpu_processes_with_slow_imports(
    settings, trains, generates, kinds, monkeypatch: pytest.MonkeyPatch
):
    config = load_config("examples/alphabet_sort/cpu.toml", given=settings)
    monkeypatch.setattr("titan_rl.generation.gpu_share.has_gpu_driver", lambda: False)
    assert fork_server.forked_kinds(config, trains=trains, generates=generates) == kinds
    monkeypatch.setattr("titan_rl.generation.gpu_share.has_gpu_driver", lambda: True)
    assert fork_server.forked_kinds(config, trains=trains, generates=generates) == []
