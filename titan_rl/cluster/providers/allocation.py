"""Which nodes an allocation of Slurm has, as scontrol says in words of every version."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from titan_rl.cluster.providers.tools import said_by
from titan_rl.core.errors import ConfigError

DEAD = ("DOWN", "ERROR", "POWER")
"""What the states of nodes begin with that run nothing."""
GOING = ("DRAIN", "FAIL")
"""Of nodes that still run what they have, and are to be rid of it."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Of an allocation, by name, in Slurm's order.

    Attributes:
        there: all that can run something.
        going: those of them that are drained, or failing.
    """

    there: Sequence[str]
    going: Sequence[str]


async def nodes_of_this_job() -> list[str]:
    """The nodes that this job began with.

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
    return await _names(nodes)


async def nodes_of(job: str) -> Nodes:
    """Those that it has now.

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
    """Whether one of its parts is of these kinds, as DOWN* and IDLE+DRAIN are."""
    return any(part.startswith(kinds) for part in state.split("+"))
