"""Hosts of Slurm: the nodes of an allocation, with a worker on each; and the job that is one.

Of Slurm it takes srun, scontrol and sbatch, and of what they say, what every version says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from titan_rl.cluster.providers.addresses import addresses_of, with_port
from titan_rl.cluster.providers.allocation import nodes_of, nodes_of_this_job
from titan_rl.cluster.providers.kept_workers import KeptWorkers, kept_workers
from titan_rl.cluster.providers.spec import ProviderSpec, Submission, command, worker_command
from titan_rl.cluster.providers.templates import rendered, unused_word
from titan_rl.cluster.providers.tools import run_tool
from titan_rl.cluster.providers.worker_process import tethered
from titan_rl.config.providers import ProviderSettings

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


LOOK_S = 20.0
"""How often slurmctld is asked at most, which serves a whole cluster."""


@contextlib.asynccontextmanager
async def workers(spec: ProviderSpec) -> AsyncGenerator[Iterable[str]]:
    """A worker on each node of this allocation, which srun starts. Nodes may come to it, and leave it."""
    nodes = await nodes_of_this_job()
    job = os.environ.get("SLURM_JOB_ID", "")
    starting = await _commands_of(spec.settings, nodes)
    async with kept_workers(starting, spec.logs, spec.tell, spec.wait_s) as kept:
        yield AllocatedWorkers(job, spec.settings, kept)


class AllocatedWorkers:
    """The `ChangingWorkers` of the nodes that an allocation has. A node that is drained, or fails, is missing, as is
    one that a smaller allocation is without.

    Args:
        job: its number.
        kept: of the nodes that it has had so far.
    """

    def __init__(self, job: str, settings: ProviderSettings, kept: KeptWorkers) -> None:
        self._job = job
        self._settings = settings
        self._kept = kept
        self._going: Collection[str] = ()
        self._looked_at: float | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    async def current(self) -> Collection[str]:
        now = asyncio.get_running_loop().time()
        if self._looked_at is None or now - self._looked_at >= LOOK_S:
            self._looked_at = now
            await self._look()
        stay = [self._kept.address_of(node) for node in self._kept.hosts if node not in self._going]
        return [address for address in stay if address is not None]

    async def _look(self) -> None:
        """A node that is drained keeps its worker, which may be moved from in peace."""
        nodes = await nodes_of(self._job)
        self._going = nodes.going
        self._kept.let_go(self._kept.hosts - {*nodes.there})
        fresh = [node for node in nodes.there if node not in self._kept.hosts]
        for node, words in await _commands_of(self._settings, fresh):
            self._kept.keep(node, words)


async def _commands_of(settings: ProviderSettings, nodes: Sequence[str]) -> list[tuple[str, list[str]]]:
    return commands(settings, await asyncio.to_thread(addresses_of, nodes))


def commands(settings: ProviderSettings, addresses: dict[str, str]) -> list[tuple[str, list[str]]]:
    """(node, what starts its worker) of each node with its address."""
    return [
        (
            node,
            tethered(
                [
                    *("srun", *STEP, f"--nodelist={node}"),
                    *worker_command(settings, with_port(address, settings.port)),
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
