"""Slurm provider: a worker on each node of an allocation, and the batch job that is the run.

It uses only srun, scontrol and sbatch, and only output that is the same in every version."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_rl.cluster.providers.addresses import addresses_of, with_port
from titan_rl.cluster.providers.spec import ProviderSpec, Submission, command, worker_command
from titan_rl.cluster.providers.tools import rendered, run_tool, said_by, unused_word
from titan_rl.cluster.providers.workers import KeptWorkers, kept_workers, tethered
from titan_rl.config.hosts import ProviderSettings
from titan_rl.core.errors import ConfigError

DEAD = ("DOWN", "ERROR", "POWER")
"""Beginnings of the states of nodes that run nothing."""
GOING = ("DRAIN", "FAIL")
"""Beginnings of the states of nodes that still run their processes, and are to be drained."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of an allocation by name, in Slurm's order.

    Attributes:
        there: All that can run something.
        going: Those of them that are drained, or failing.
    """

    there: Sequence[str]
    going: Sequence[str]


async def nodes_of_this_job() -> list[str]:
    """The nodes that this job began with.

    Raises:
        ConfigError: This is none.
        ProviderError: Slurm does not say.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError(
            'hosts.provider = "slurm" uses the nodes of an allocation, and SLURM_JOB_NODELIST is not set: start the '
            "run with titan-rl launch CONFIG, or in a job of sbatch or salloc"
        )
    return await _names(nodes)


async def nodes_of(job: str) -> Nodes:
    """Nodes of a job now.

    Raises:
        ProviderError: Slurm does not say.
    """
    said = await said_by(["scontrol", "--oneliner", "show", "job", job])
    named = re.search(r"\sNodeList=(\S+)", said)
    if named is None or named[1] in ("(null)", "None"):
        return Nodes((), ())
    names = await _names(named[1])
    states = _states(await said_by(["scontrol", "--oneliner", "show", "node", named[1]]))
    there = [name for name in names if not _is(states.get(name, ""), DEAD)]
    return Nodes(there, [name for name in there if _is(states.get(name, ""), GOING)])


async def _names(nodes: str) -> list[str]:
    """Example: of node[1-2] they are node1 and node2."""
    return (await said_by(["scontrol", "show", "hostnames", nodes])).split()


def _states(said: str) -> dict[str, str]:
    """Example: a line with NodeName=node1 and State=ALLOCATED+DRAIN gives {"node1": "ALLOCATED+DRAIN"}."""
    lines = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in said.splitlines()]
    return {line["NodeName"]: line.get("State", "") for line in lines if "NodeName" in line}


def _is(state: str, kinds: tuple[str, ...]) -> bool:
    """Whether one part of a state begins with one of these kinds; states look like DOWN* and IDLE+DRAIN."""
    return any(part.startswith(kinds) for part in state.split("+"))


LONGEST_NAME = 60
"""Longest name of a run, to which the number of its job is added."""

STEP = (
    *("--nodes=1", "--ntasks=1"),
    "--overlap",  # it shares its node with the controller and with a user's own steps
    *("--mem=0", "--cpu-bind=none"),  # all that the job has of the node: else one core of it
    "--mpi=none",
    "--no-kill",
    "--job-name=titan-rl-worker",
)


LOOK_S = 20.0
"""Least interval between requests to slurmctld, which serves a whole cluster."""


@contextlib.asynccontextmanager
async def workers(spec: ProviderSpec) -> AsyncGenerator[Iterable[str]]:
    """A worker on each node of this allocation, which srun starts. Nodes may come to it, and leave it."""
    nodes = await nodes_of_this_job()
    job = os.environ.get("SLURM_JOB_ID", "")
    starting = await _commands_of(spec.settings, nodes)
    async with kept_workers(starting, spec.logs, spec.console, spec.wait_s) as kept:
        yield AllocatedWorkers(job, spec.settings, kept)


class AllocatedWorkers:
    """The `ChangingWorkers` of the nodes that an allocation has. A node that is drained, or fails, is missing, as is
    one that a smaller allocation is without.

    Args:
        job: Its number.
        kept: Of the nodes that it has had so far.
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
    """Give the script to sbatch."""
    (submission.folder / submission.run_dir).mkdir(parents=True, exist_ok=True)  # Slurm makes no folder for its log
    job = run_tool(["sbatch", "--parsable"], script).strip().partition(";")[0]
    log = Path(submission.run_dir) / f"{submission.name[:LONGEST_NAME]}-{job}.log"
    return f"job {job} is submitted; its output: {log}; squeue --job {job} shows it, scancel {job} stops it"
