"""Slurm provider: a worker on each node of an allocation, and a batch job for the run.

It uses only srun, scontrol and sbatch, and only output that is the same in all versions of Slurm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_rl.cluster.providers.addresses import addresses_of
from titan_rl.cluster.providers.cluster_commands import rendered, run_tool, tool_output, unused_word
from titan_rl.cluster.providers.host_worker_commands import KeptWorkers, kept_workers, tethered
from titan_rl.cluster.providers.spec import ProviderSpec, Submission, command, worker_command
from titan_rl.config.hosts import ProviderSettings, join_address
from titan_rl.core.errors import ConfigError

DEAD = ("DOWN", "ERROR", "POWER")
"""Prefixes of the states of nodes that run nothing."""
GOING = ("DRAIN", "FAIL")
"""Prefixes of the states of nodes that still run their processes, and should be drained."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of an allocation by name, in Slurm's order.

    Attributes:
        present: Nodes that can run processes.
        going: Nodes in `present` that are being drained or are failing.
    """

    present: Sequence[str]
    going: Sequence[str]


async def nodes_of_this_job() -> list[str]:
    """Return the nodes that this job started with.

    Raises:
        ConfigError: This process is not part of a job.
        ProviderError: Slurm does not answer.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError(
            'hosts.provider = "slurm" uses the nodes of an allocation, and SLURM_JOB_NODELIST is not set: start the '
            "run with titan-rl launch CONFIG, or in a job of sbatch or salloc"
        )
    return await _names(nodes)


async def nodes_of(job: str) -> Nodes:
    """Return the current nodes of a job.

    Raises:
        ProviderError: Slurm does not answer.
    """
    output = await tool_output(["scontrol", "--oneliner", "show", "job", job])
    named = re.search(r"\sNodeList=(\S+)", output)
    if named is None or named[1] in ("(null)", "None"):
        return Nodes((), ())
    names = await _names(named[1])
    states = _states(await tool_output(["scontrol", "--oneliner", "show", "node", named[1]]))
    present = [name for name in names if not _is(states.get(name, ""), DEAD)]
    return Nodes(present, [name for name in present if _is(states.get(name, ""), GOING)])


async def _names(nodes: str) -> list[str]:
    """Expand a list of nodes. Example: node[1-2] becomes node1 and node2."""
    return (await tool_output(["scontrol", "show", "hostnames", nodes])).split()


def _states(output: str) -> dict[str, str]:
    """Parse the states of nodes by name.

    Example: a line with NodeName=node1 and State=ALLOCATED+DRAIN gives {"node1": "ALLOCATED+DRAIN"}.
    """
    lines = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in output.splitlines()]
    return {line["NodeName"]: line.get("State", "") for line in lines if "NodeName" in line}


def _is(state: str, kinds: tuple[str, ...]) -> bool:
    """Whether one part of a state begins with one of these prefixes. States look like DOWN* and IDLE+DRAIN."""
    return any(part.startswith(kinds) for part in state.split("+"))


LONGEST_NAME = 60
"""Longest name of a run in the names of its job and its log."""

STEP = (
    *("--nodes=1", "--ntasks=1"),
    "--overlap",  # the step shares its node with the controller and the user's own steps
    *("--mem=0", "--cpu-bind=none"),  # all of the job's memory and cores on the node, instead of one core
    "--mpi=none",
    "--no-kill",
    "--job-name=titan-rl-worker",
)


LOOK_S = 20.0
"""Minimum interval between requests to slurmctld, which serves a whole cluster, in seconds."""


@contextlib.asynccontextmanager
async def workers(spec: ProviderSpec) -> AsyncGenerator[Iterable[str]]:
    """Context manager: start a worker on each node of this allocation with srun. Nodes may be added and removed."""
    nodes = await nodes_of_this_job()
    job = os.environ.get("SLURM_JOB_ID", "")
    starting = await _commands_of(spec.settings, nodes)
    async with kept_workers(starting, spec.logs, spec.console, spec.wait_s) as kept:
        yield AllocatedWorkers(job, spec.settings, kept)


class AllocatedWorkers:
    """The `ChangingWorkers` of an allocation. Does not list nodes that are drained, are failing or have been removed
    from the allocation.

    Args:
        job: Number of the job.
        kept: Workers of the nodes that the allocation has had so far.
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
        """Update the nodes of the allocation. A node that is being drained keeps its worker while its processes
        move."""
        nodes = await nodes_of(self._job)
        self._going = nodes.going
        self._kept.release(self._kept.hosts - {*nodes.present})
        fresh = [node for node in nodes.present if node not in self._kept.hosts]
        for node, words in await _commands_of(self._settings, fresh):
            self._kept.keep(node, words)


async def _commands_of(settings: ProviderSettings, nodes: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Pair each node with the command that starts its worker."""
    addresses = await asyncio.to_thread(addresses_of, nodes)
    workers = {
        node: worker_command(settings, join_address(address, settings.port)) for node, address in addresses.items()
    }
    return [(node, tethered(["srun", *STEP, f"--nodelist={node}", *words])) for node, words in workers.items()]


def render(submission: Submission) -> str:
    """Render the batch script: it starts the run, and continues it when the job is requeued."""
    settings = submission.settings
    name = submission.name[:LONGEST_NAME]
    return rendered(
        "slurm.sh.jinja",
        hosts=settings,
        name=name,
        run_dir=submission.run_dir,
        log=Path(submission.run_dir) / f"{name}-%j.log",
        folder=submission.folder,
        command=shlex.join(command(settings)),
        settings='"$settings"',
        config=submission.config,
        end_of_config=unused_word("END_OF_SETTINGS", submission.config),
    )


def submit(submission: Submission, script: str) -> str:
    """Submit the script with sbatch."""
    (submission.folder / submission.run_dir).mkdir(parents=True, exist_ok=True)  # Slurm makes no folder for its log
    job = run_tool(["sbatch", "--parsable"], script).strip().partition(";")[0]
    log = Path(submission.run_dir) / f"{submission.name[:LONGEST_NAME]}-{job}.log"
    return f"job {job} is submitted; its output: {log}; squeue --job {job} shows it, scancel {job} stops it"
