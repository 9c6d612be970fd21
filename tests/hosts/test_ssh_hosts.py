"""Workers that a real ssh starts on hosts of their own, and that end with whoever had them started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from depth import on_more_hosts
from hosts.namespaces import NamespaceHost, Namespaces

LIMIT_S = 30.0
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
from titan_rl.providers.settings import ProviderSettings, SSHConfig
from titan_rl.providers.spec import ProviderSpec
from titan_rl.providers.ssh import workers

async def main():
    ssh = SSHConfig(hosts=sys.argv[3:], options=["-F", sys.argv[2]])
    settings = ProviderSettings(provider="ssh", ssh=ssh)
    async with workers(ProviderSpec(settings, Path(sys.argv[1]), print, 30)) as addresses:
        print(*addresses, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def client_config(hosts: Namespaces, tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A configuration of ssh by which the hosts of this module are reached as one, two and three."""
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(sshd).exists():
        pytest.skip("sshd is not installed: apt-get install openssh-server")
    keys = tmp_path_factory.mktemp("keys")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    (keys / "sshd_config").write_text(SERVER.format(keys=keys))
    known = [f"Host {name}\n  HostName {host.address}" for name, host in zip(("one", "two"), hosts, strict=False)]
    all_hosts = f"Host *\n  User root\n  IdentityFile {keys}/user\n  UserKnownHostsFile {keys}/known\n"
    config = keys / "client_config"
    config.write_text("\n".join([*known, all_hosts, "  StrictHostKeyChecking accept-new\n"]))
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd gives up its rights
    servers = [host.run([sshd, "-D", "-e", "-f", str(keys / "sshd_config")], output=keys / host.name) for host in hosts]
    for host in hosts:
        until(lambda host=host: "Server listening" in (keys / host.name).read_text(), f"sshd listens on {host.name}")
    yield config
    for server in servers:
        server.send(signal.SIGKILL)
        server.wait()


@on_more_hosts
@pytest.mark.parametrize("end", ["in order", "killed"])
def test_workers_are_there_for_as_long_as_their_controller(
    end: str, hosts: Namespaces, client_config: Path, tmp_path: Path
) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path, client_config, "one", "two"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    addresses = starter.stdout.readline().split()
    assert addresses == [f"{host.address}:22222" for host in hosts.hosts[:2]], starter.stdout.read()
    assert [len(workers(host)) for host in hosts] == [1, 1, 0]
    if end == "killed":
        starter.kill()
        starter.wait(LIMIT_S)
        until(lambda: not any(workers(host) for host in hosts), "every worker has ended")
    else:
        starter.stdin.close()
        assert starter.wait(LIMIT_S) == 0
        assert not any(workers(host) for host in hosts)
    starter.stdout.close()
    assert f"listening on {addresses[1]}" in (tmp_path / "worker-two.log").read_text()


def workers(host: NamespaceHost) -> list[str]:
    begins, ends = f"{sys.executable} ", f"worker --listen {host.worker_address}"
    return [line for line in host.processes() if line.startswith(begins) and line.endswith(ends)]


def until(done, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, f"not in {LIMIT_S:g} s: {what}"
        time.sleep(0.02)
