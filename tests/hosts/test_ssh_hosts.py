"""Workers that a real ssh starts on virtual hosts, and that end with their controller."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from background import HANG_S
from depth import on_more_hosts
from hosts.namespaces import HostProcess, NamespaceHost, Namespaces
from hosts.waiting import until

SERVER = """
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
"""
PROGRAM = """
import asyncio, sys
from pathlib import Path
from titan_rl.config.hosts import ProviderSettings
from titan_rl.core.console import LOG
from titan_rl.cluster.providers.spec import ProviderSpec
from titan_rl.cluster.providers.ssh import workers

async def main():
    soon = [f"-o{name}=1" for name in ("ConnectTimeout", "ServerAliveInterval", "ServerAliveCountMax")]
    settings = ProviderSettings(provider="ssh", names=sys.argv[3:], options=["-F", sys.argv[2], *soon])
    async with workers(ProviderSpec(settings, Path(sys.argv[1]), LOG, 30)) as there:
        print("begins", *there, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print("now", *await there.current(), flush=True)

asyncio.run(main())
"""


class Servers:
    """sshd on several hosts.

    Attributes:
        client_config: Config file of ssh, in which the first hosts are named one and two.
    """

    def __init__(self, sshd: str, keys: Path) -> None:
        self._sshd, self._keys = sshd, keys
        self._running: list[HostProcess] = []
        self.client_config = keys / "client_config"

    def serve(self, host: NamespaceHost) -> None:
        log = self._keys / f"{host.name}-{len(self._running)}"
        self._running.append(host.run([self._sshd, "-D", "-e", "-f", str(self._keys / "sshd_config")], output=log))
        until(lambda: "Server listening" in log.read_text(), f"sshd listens on {host.name}")

    def close(self) -> None:
        for server in self._running:
            server.send(signal.SIGKILL)
            server.wait()


@pytest.fixture(scope="module")
def servers(hosts: Namespaces, tmp_path_factory: pytest.TempPathFactory) -> Generator[Servers]:
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(sshd).exists():
        pytest.skip("sshd is not installed: apt-get install openssh-server")
    keys = tmp_path_factory.mktemp("keys")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    (keys / "sshd_config").write_text(SERVER.format(keys=keys))
    known = [f"Host {name}\n  HostName {host.address}" for name, host in zip(("one", "two"), hosts, strict=False)]
    all_hosts = f"Host *\n  User root\n  IdentityFile {keys}/user\n  UserKnownHostsFile {keys}/known\n"
    made = Servers(sshd, keys)
    made.client_config.write_text("\n".join([*known, all_hosts, "  StrictHostKeyChecking accept-new\n"]))
    Path("/run/sshd").mkdir(exist_ok=True)  # for sshd's privilege separation
    with contextlib.closing(made):
        for host in hosts:
            made.serve(host)
        yield made


class Controller:
    """Process with workers on hosts one and two, which prints their addresses."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, folder, servers.client_config, "one", "two"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.messages: list[str] = []
        self.begins_with = self._next("begins")

    def now(self) -> list[str]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._next("now")

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(HANG_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _next(self, word: str) -> list[str]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            first, *rest = line.split()
            if first == word:
                return rest
            self.messages.append(line.strip())
        raise AssertionError(f"it ended: {self.messages}")


@pytest.fixture
def controller(servers: Servers, tmp_path: Path) -> Generator[Controller]:
    with contextlib.closing(Controller(servers, tmp_path)) as made:
        yield made


@on_more_hosts
@pytest.mark.parametrize("end", ["gracefully", "killed"])
def test_ssh_workers_end_with_their_controller(
    end: str, hosts: Namespaces, controller: Controller, tmp_path: Path
) -> None:
    assert controller.begins_with == [f"{host.address}:22222" for host in hosts.hosts[:2]]
    assert [len(workers(host)) for host in hosts] == [1, 1, 0]
    if end == "killed":
        controller.process.kill()
        controller.process.wait(HANG_S)
        until(lambda: not any(workers(host) for host in hosts), "every worker has ended")
    else:
        assert controller.end() == 0
        assert not any(workers(host) for host in hosts)
    assert f"listening on {controller.begins_with[1]}" in (tmp_path / "worker-two.log").read_text()


@on_more_hosts
def test_ssh_worker_restarts_when_its_host_returns(hosts: Namespaces, servers: Servers, tmp_path: Path) -> None:
    one, two = (f"{host.address}:22222" for host in hosts.hosts[:2])
    hosts[1].kill()
    with contextlib.closing(Controller(servers, tmp_path)) as controller:
        assert controller.begins_with == [one], "the run begins without it"
        hosts[1].start()
        servers.serve(hosts[1])
        until(lambda: controller.now() == [one, two], "the host that was away has its worker")
        hosts[1].kill()
        until(lambda: controller.now() == [one], "the host is killed")
        hosts[1].start()
        servers.serve(hosts[1])
        until(lambda: controller.now() == [one, two], "the host is back, with a worker")
        assert controller.end() == 0
    assert controller.messages[0].startswith("the run starts without two, and will try it again: the worker on two has")
    assert not any(workers(host) for host in hosts)


def workers(host: NamespaceHost) -> list[str]:
    begins, ends = f"{sys.executable} ", f"worker --listen {host.worker_address}"
    return [line for line in host.processes() if line.startswith(begins) and line.endswith(ends)]
