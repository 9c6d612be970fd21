"""Slurm cluster in namespaces of this machine: a login node that submits and schedules, and nodes that run jobs.

Needs Debian's slurmctld, slurmd, slurm-client and munge, but neither configures them nor starts them as services.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from hosts.namespaces import NamespaceHost, Namespaces, namespaces, why_not

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue")
START_S = 30.0

CONFIG = """
ClusterName=titan
SlurmctldHost={login}({login_address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
SlurmdTimeout=30
KillWait=30
SchedulerParameters=sched_interval=2,batch_sched_delay=0,permit_job_expansion
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=10 State=UP
"""


class SlurmCluster:
    """Slurm cluster, with commands that run on its login node."""

    def __init__(self, login: NamespaceHost, nodes: list[NamespaceHost], environment: Mapping[str, str]) -> None:
        self.login, self.nodes = login, nodes
        self._environment = environment

    def run(self, *command: str, timeout_s: float = 60.0) -> str:
        """Run a command, which must succeed, and return its output."""
        try:
            return self.login.ask(command, self._environment, timeout_s)
        except subprocess.CalledProcessError as failed:
            raise AssertionError(f"{' '.join(command)} ended with {failed.returncode}: {failed.stdout}") from None

    def job(self, number: str) -> dict[str, str]:
        """Fields of a job from scontrol, such as JobState, NodeList, ExitCode and Restarts."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, done: Callable[[], bool], what: str, timeout_s: float) -> float:
        """Poll until `done` is true, and return the seconds it took."""
        began = time.monotonic()
        while not done():
            if time.monotonic() - began > timeout_s:
                raise AssertionError(f"not in {timeout_s:g} s: {what}")
            time.sleep(0.2)
        return time.monotonic() - began


@contextlib.contextmanager
def slurm_cluster(folder: Path, num_nodes: int = 2) -> Generator[SlurmCluster]:
    """Run a cluster until the block ends.

    Args:
        folder: Folder for files of the daemons, which is made and kept.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        sys.exit(f"{', '.join(missing)}: not installed; apt-get install slurmctld slurmd slurm-client munge")
    if (reason := why_not()) is not None:
        sys.exit(reason)
    with contextlib.ExitStack() as ends:
        hosts = ends.enter_context(namespaces(1 + num_nodes))
        login, *nodes = hosts
        _configure(folder, login, nodes, hosts)
        ends.callback(_end, _munged(folder))
        environment = {"SLURM_CONF": f"{folder}/slurm.conf"}
        for host in hosts:
            host.ask(["mount", "--bind", f"{folder}/hosts", "/etc/hosts"])
        login.run(["slurmctld", "-D"], environment, folder / "slurmctld.txt")
        for node in nodes:
            node.run(["slurmd", "-D", "-N", node.name], environment, folder / f"{node.name}.txt")
        cluster = SlurmCluster(login, nodes, environment)
        cluster.wait_until(lambda: _idle(cluster) == num_nodes, "every node is idle", START_S)
        yield cluster


def _configure(folder: Path, login: NamespaceHost, nodes: list[NamespaceHost], hosts: Namespaces) -> None:
    for node in nodes:
        (folder / "spool" / node.name).mkdir(parents=True, exist_ok=True)
    (folder / "state").mkdir(exist_ok=True)
    described = [f"NodeName={node.name} NodeAddr={node.address} CPUs={os.cpu_count()} State=UNKNOWN" for node in nodes]
    text = CONFIG.format(
        folder=folder,
        login=login.name,
        login_address=login.address,
        nodes="\n".join(described),
        names=",".join(node.name for node in nodes),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n")
    names = [f"{host.address} {host.name}" for host in hosts]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))


def _munged(folder: Path) -> subprocess.Popen[bytes]:
    """Start munged, by which the daemons authenticate each other over a socket file that all of them see."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    given = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    given |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    options = [f"--{name}={path}" for name, path in given.items()]
    munged = subprocess.Popen(["munged", "--foreground", "--force", *options], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(folder / "munge.socket"))
            return munged
        time.sleep(0.05)
    raise AssertionError((folder / "munge.log").read_text())


def _idle(cluster: SlurmCluster) -> int:
    try:
        return cluster.run("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
    except AssertionError:  # slurmctld is not up
        return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
