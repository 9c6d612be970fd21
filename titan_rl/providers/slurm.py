"""Hosts of Slurm: the nodes of an allocation, with a worker on each; and the job that is one.

Of Slurm it takes srun, scontrol and sbatch, and of what they say, what every version says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from titan_rl.errors import ConfigError
from titan_rl.providers.addresses import addresses_of, with_port
from titan_rl.providers.settings import ProviderSettings
from titan_rl.providers.spec import ProviderSpec, Submission, command
from titan_rl.providers.templates import rendered, unused_word
from titan_rl.providers.tools import run_tool, said_by
from titan_rl.providers.worker_process import tethered, worker_processes

LONGEST_NAME = 60
"""Of a run, before its job's number."""

STEP = (
    *("--nodes=1", "--ntasks=1"),
    "--overlap",  # it shares its node with the controller and with a user's own steps
    *("--mem=0", "--cpu-bind=none"),  # all that the job has of the node: else one core of it
    "--mpi=none",
    "--no-kill",
    "--job-name=titan-rl-worker",
)


@contextlib.asynccontextmanager
async def workers(spec: ProviderSpec) -> AsyncGenerator[Sequence[str]]:
    """A worker on each node of this allocation, which srun starts."""
    nodes = await allocated_nodes()
    addresses = await asyncio.to_thread(addresses_of, nodes)
    async with worker_processes(commands(spec.settings, addresses), spec.logs, spec.tell, spec.wait_s) as listening:
        yield listening


async def allocated_nodes() -> list[str]:
    """The names of this allocation's nodes, in Slurm's order.

    Raises:
        ConfigError: this is none.
        ProviderError: Slurm does not say.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError(
            'hosts.provider = "slurm" takes the nodes of an allocation, and SLURM_JOB_NODELIST is not set: begin the '
            "run with titan-rl launch CONFIG, or in a job of sbatch or salloc"
        )
    return (await said_by(["scontrol", "show", "hostnames", nodes])).split()


def commands(settings: ProviderSettings, addresses: dict[str, str]) -> list[tuple[str, list[str]]]:
    """(node, what starts its worker) of each node with its address."""
    return [
        (
            node,
            tethered(
                [
                    *("srun", *STEP, f"--nodelist={node}"),
                    *(*command(settings), "worker", "--listen", with_port(address, settings.port)),
                ]
            ),
        )
        for node, address in addresses.items()
    ]


def render(submission: Submission) -> str:
    """The batch script: it begins the run, and goes on with it when the job has its next turn."""
    slurm = submission.settings.slurm
    name = submission.name[:LONGEST_NAME]
    return rendered(
        "slurm.sh.jinja",
        slurm=slurm,
        name=name,
        run_dir=submission.run_dir,
        log=Path(submission.run_dir) / f"{name}-%j.log",
        folder=submission.folder,
        command=shlex.join(command(submission.settings)),
        settings='"$settings"',
        config=submission.config,
        end_of_config=unused_word("END_OF_SETTINGS", submission.config),
    )


def submit(submission: Submission, script: str) -> str:
    """Give the script to sbatch."""
    (submission.folder / submission.run_dir).mkdir(parents=True, exist_ok=True)  # Slurm makes no folder for its log
    job = run_tool(["sbatch", "--parsable"], script).strip().partition(";")[0]
    log = Path(submission.run_dir) / f"{submission.name[:LONGEST_NAME]}-{job}.log"
    return f"job {job} is submitted; its output: {log}; squeue --job {job} shows it, scancel {job} ends it in order"
