"""Slurm job whose nodes are drained, resumed, removed, added and fail, as the provider reports them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from hosts.namespaces import NamespaceHost

from .cluster import SlurmCluster

LIMIT_S = 60.0
PROJECT = Path(__file__).parents[3]
PROGRAM = """
import asyncio, sys
from pathlib import Path
from titan_rl.cluster.providers import slurm
from titan_rl.config.hosts import ProviderSettings
from titan_rl.cluster.providers.spec import ProviderSpec
from titan_rl.core.console import Console

slurm.LOOK_S = 1.0

class Printed(Console):
    def message(self, text):
        print(text, flush=True)

    warning = message

async def main():
    spec = ProviderSpec(ProviderSettings(provider="slurm"), Path(sys.argv[1]), Printed(), 60)
    async with slurm.workers(spec) as there:
        before = ""
        while True:
            if (now := " ".join(sorted(await there.current()))) != before:
                print("now", now, flush=True)
                before = now
            await asyncio.sleep(0.5)

asyncio.run(main())
"""


def nodes_come_and_go(cluster: SlurmCluster, folder: Path, show: Callable[[str], None]) -> None:
    """Run the job and change its nodes.

    Args:
        folder: New folder for the output of the job.
    """
    folder.mkdir()
    (output := folder / "output.txt").touch()
    job = _submitted(cluster, folder)
    first, second = cluster.nodes
    one, both = f"{first.address}:22222", f"{first.address}:22222 {second.address}:22222"

    def scontrol(*words: str) -> None:
        show(f"scontrol update {' '.join(words)}")
        cluster.run("scontrol", "update", *words)

    def then(now: str, what: str) -> None:
        took = cluster.wait_until(lambda: _now(output) == now, what, LIMIT_S)
        show(f"{what}, after {took:.1f} s")

    then(both, "both nodes have workers")
    scontrol(f"NodeName={second.name}", "State=DRAIN", "Reason=test")
    then(one, "a drained node is reported as leaving")
    scontrol(f"NodeName={second.name}", "State=RESUME")
    then(both, "it is resumed")
    scontrol(f"JobId={job}", "NumNodes=1")
    then(one, "a node leaves the job")
    _expand(cluster, job, scontrol)
    then(both, "a node comes to the job")
    scontrol(f"NodeName={second.name}", "State=DOWN", "Reason=test")
    then(one, "a node fails")
    cluster.run("scancel", job)
    cluster.wait_until(lambda: not any(map(_programs, cluster.nodes)), "nothing of it is left", LIMIT_S)
    show(output.read_text())


def _expand(cluster: SlurmCluster, job: str, scontrol: Callable[..., None]) -> None:
    """Add a node of another job, which is Slurm's way to expand a job."""
    cluster.run("salloc", "--no-shell", "--nodes=1", f"--dependency=expand:{job}", "--job-name=more")
    scontrol(f"JobId={cluster.run('squeue', '--noheader', '--name=more', '--format=%i').strip()}", "NumNodes=0")
    with contextlib.suppress(AssertionError):  # without a job database it succeeds but reports an error
        scontrol(f"JobId={job}", "NumNodes=ALL")


def _submitted(cluster: SlurmCluster, folder: Path) -> str:
    """Submit a job on both nodes that only runs the provider, and return its id."""
    program, script = folder / "program.py", folder / "script"
    program.write_text(PROGRAM)
    script.write_text(f"#!/bin/bash\nPYTHONPATH={PROJECT} exec {sys.executable} {program} {folder}\n")
    options = ["--nodes=2", "--no-kill", f"--output={folder}/output.txt"]
    return cluster.run("sbatch", "--parsable", *options, str(script)).strip()


def _programs(node: NamespaceHost) -> list[str]:
    """Processes of a node other than Slurm's."""
    return [line for line in node.processes() if "slurmd" not in line]


def _now(output: Path) -> str | None:
    lists = [line.removeprefix("now ") for line in output.read_text().splitlines() if line.startswith("now ")]
    return lists[-1] if lists else None
