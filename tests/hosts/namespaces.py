"""Virtual hosts on this machine: kernel namespaces, each with its own address, shared memory, hostname and process ids.
Only root may make them, so tests that need them are skipped otherwise."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from .network import PREFIX, clean_up_after_the_dead, free_network, hardware_address, ip

PROJECT = Path(__file__).parents[2]
TOOLS = ("ip", "unshare", "nsenter", "setpriv")
PORT = 22222
START_S = 120.0  # on a busy machine
_SPACES = ("net", "mount", "uts", "ipc", "pid")
# The first process of a host reaps the others, and runs until it is killed, which ends all of them.
_INIT = (
    "mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && {private} hostname {name} && ip link set lo up "
    "&& echo ready && while :; do sleep 1000 & wait $!; done"
)


def why_not() -> str | None:
    """Reason why this machine cannot have such hosts, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are made of namespaces, which only root may make"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts are made with {', '.join(missing)}: install iproute2 and util-linux"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        return f"no namespaces can be made here: {tried.stderr.strip()}"
    probe = f"{PREFIX}{os.getpid()}p"
    if subprocess.run(["ip", "link", "add", probe, "type", "bridge"], capture_output=True).returncode:
        return "no bridge can be made here"
    ip("link", "del", probe)
    return None


class HostProcess:
    """Process on a host.

    Attributes:
        pid: Process id on this machine.
    """

    def __init__(self, outer: subprocess.Popen[str], pid: int) -> None:
        self.outer = outer
        self.pid = pid

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            if number == signal.SIGCONT:
                self.outer.send_signal(number)  # nsenter stops together with its child

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for the end, and return the exit status."""
        return self.outer.wait(timeout_s)


class NamespaceHost:
    """Host that runs until `kill`. `start` then makes an empty one with the same name and address.

    Attributes:
        temporary: Folder of temporary files, which no other host sees.
    """

    def __init__(
        self, name: str, address: str, bridge: str, link: str, temporary: Path, private: Sequence[Path]
    ) -> None:
        self.name, self.address = name, address
        self.temporary = temporary
        self._bridge, self._link = bridge, link
        self._private = [temporary, *private]
        self._unshare: subprocess.Popen[str]
        self._outer: list[subprocess.Popen[str]] = []
        self._init: int

    def start(self) -> None:
        private = "".join(f"mount -t tmpfs tmpfs {folder} && " for folder in self._private)
        spaces = [f"--{space}" for space in _SPACES]
        script = _INIT.format(name=self.name, private=private)
        self._unshare = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "--fork", "--kill-child", "bash", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "ready\n"
        self._init = _child_of(self._unshare.pid)
        peer = f"{self._link}p"
        ip("link", "add", self._link, "type", "veth", "peer", "name", peer)
        ip("link", "set", peer, "netns", str(self._init))
        ip("link", "set", self._link, "master", self._bridge, "up")
        for command in (
            f"ip link set {peer} name eth0",
            f"ip link set eth0 address {hardware_address(self.address)}",  # a rebooted machine keeps its address
            f"ip addr add {self.address}/24 dev eth0",
            "ip link set eth0 up",
        ):
            subprocess.run([*self._enter("net"), *command.split()], check=True)

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, output: Path | None = None
    ) -> HostProcess:
        """Start a process on the host, in this project's folder."""
        with contextlib.ExitStack() as files:
            log = subprocess.DEVNULL if output is None else files.enter_context(output.open("a"))
            process = subprocess.Popen(
                [*self._enter(*_SPACES)[:-1], f"--wdns={PROJECT}", "--", *command],
                env={**os.environ, **self._variables, "OMP_NUM_THREADS": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                cwd=PROJECT,
            )
        self._outer.append(process)
        return HostProcess(process, _child_of(process.pid))

    def ask(self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> str:
        """Run a command on the host, and return its output.

        Raises:
            subprocess.CalledProcessError: The command failed. `stdout` contains its errors, too.
        """
        done = subprocess.run(
            [*self._enter(*_SPACES)[:-1], f"--wdns={PROJECT}", "--", *command],
            env={**os.environ, **self._variables, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=True,
        )
        return done.stdout

    def start_worker(self, output: Path, *options: str, env: Mapping[str, str] | None = None) -> HostProcess:
        """Start `titan-rl worker`, and return once it listens on `worker_address`.

        Args:
            output: File to which its output is appended.
        """
        before = output.stat().st_size if output.exists() else 0
        command = [sys.executable, "-m", "titan_rl.cli.main", "worker", "--listen", self.worker_address, *options]
        worker = self.run(command, env, output)
        deadline = time.monotonic() + START_S
        while "listening on" not in output.read_text()[before:]:
            if worker.outer.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the worker on {self.name} did not start:\n{output.read_text()[before:]}")
            time.sleep(0.01)
        return worker

    @property
    def _variables(self) -> dict[str, str]:
        return {"PYTHONPATH": str(PROJECT), "TMPDIR": str(self.temporary)}

    @property
    def worker_address(self) -> str:
        return f"{self.address}:{PORT}"

    def processes(self) -> list[str]:
        """Command lines of the host's processes, except for its first process and the `sleep` of that."""
        return list(self._processes().values())

    def pids(self, text: str) -> dict[int, int]:
        """Pids on this machine, by pid on the host, of processes whose command line contains `text`."""
        found: dict[int, int] = {}
        for pid, line in self._processes().items():
            if text in line:
                status = Path(f"/proc/{pid}/status").read_text()
                (numbers,) = [line.split() for line in status.splitlines() if line.startswith("NSpid:")]
                found[int(numbers[-1])] = pid
        return found

    def _processes(self) -> dict[int, str]:
        """Command lines by pid on this machine."""
        found: dict[int, str] = {}
        space = os.readlink(f"/proc/{self._init}/ns/pid")
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == space and int(entry.name) != self._init:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line and line != "sleep 1000":
                        found[int(entry.name)] = line
        return found

    def files(self, folder: str) -> list[str]:
        """File names in a folder as the host sees it."""
        return sorted(os.listdir(f"/proc/{self._init}/root{folder}"))

    def kill(self) -> None:
        """End the whole host, as a power failure would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        for process in self._outer:  # one that stopped together with its child would not reap it
            process.kill()
        self._outer.clear()
        self._unshare.wait()
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()
        subprocess.run(["ip", "link", "del", self._link], capture_output=True)

    def link_down(self) -> None:
        """Partition the host from the network, in both directions."""
        ip("link", "set", self._link, "down")

    def link_up(self) -> None:
        ip("link", "set", self._link, "up")

    def received_bytes(self) -> int:
        """Bytes received since the link was made."""
        return int(Path(f"/sys/class/net/{self._link}/statistics/tx_bytes").read_text())

    def cap(self, mbit: int) -> None:
        """Limit the bandwidth of its link in both directions, in Mbit/s."""
        shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms"]
        subprocess.run(["tc", "qdisc", "replace", "dev", self._link, *shape], check=True)
        subprocess.run([*self._enter("net"), "tc", "qdisc", "replace", "dev", "eth0", *shape], check=True)

    def uncap(self) -> None:
        """Remove the bandwidth limit."""
        subprocess.run(["tc", "qdisc", "del", "dev", self._link, "root"], check=True)
        subprocess.run([*self._enter("net"), "tc", "qdisc", "del", "dev", "eth0", "root"], check=True)

    def _enter(self, *spaces: str) -> list[str]:
        return ["nsenter", "--target", str(self._init), *[f"--{space}" for space in spaces], "--"]


class Namespaces:
    """Hosts connected by a bridge, on which this process has an address, too.

    Attributes:
        gateway: Address of this process.
    """

    def __init__(self, hosts: Sequence[NamespaceHost], gateway: str) -> None:
        self.hosts = hosts
        self.gateway = gateway

    def __getitem__(self, index: int) -> NamespaceHost:
        return self.hosts[index]

    def __iter__(self):
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)


@contextlib.contextmanager
def namespaces(count: int, private: Sequence[Path] = ()) -> Generator[Namespaces]:
    """Make hosts that exist until the block ends.

    Args:
        private: Folders that are empty and private on each host. The rest of the file system is shared.
    """
    clean_up_after_the_dead()
    stem = f"{PREFIX}{os.getpid()}"
    bridge, network = f"{stem}b{_numbers()}", free_network()
    ip("link", "add", bridge, "type", "bridge")
    hosts: list[NamespaceHost] = []
    temporary = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short, as paths of sockets are limited
    try:
        ip("addr", "add", f"{network}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for index in range(1, count + 1):
            name, address, link = f"{stem}h{index}", f"{network}.{index + 1}", f"{bridge}{index}"
            host = NamespaceHost(name, address, bridge, link, temporary, private)
            host.start()
            hosts.append(host)
        yield Namespaces(hosts, f"{network}.1")
    finally:
        for host in hosts:
            host.kill()
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
        temporary.rmdir()


_made = iter("abcdefghijklmnopqrstuvwxyz" * 40)


def _numbers() -> str:
    return next(_made)


def _child_of(pid: int) -> int:
    """Wait for the single child of a process, and return its pid on this machine."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if children:
                return int(children[0])
        time.sleep(0.001)
    raise AssertionError(f"process {pid} started no child")
