"""Options of the router of a run or a server, and of its shards."""

from __future__ import annotations

from typing import Any

from titan_rl.config.sections import GenerationConfig, RoutingConfig, StateDictConfig
from titan_rl.generation.router.replica import Limits


def router_options(
    generation: GenerationConfig, routing: RoutingConfig, statedict: StateDictConfig, wait_s: float
) -> dict[str, Any]:
    """Make the keyword arguments of `GeneratorRouter`, except the strategy.

    A shard whose worker answers nothing for `generation.stall_timeout_s`, because an environment blocks its event loop,
    is given up like a generator that is silent for that long.

    Args:
        wait_s: Longest time that requests wait for enough generators, in seconds.
    """
    return {
        "stall_timeout_s": generation.stall_timeout_s,
        "limits": Limits(pull_s=statedict.pull_timeout_s, no_replica_s=wait_s, shard_s=generation.stall_timeout_s),
        "least_replicas": generation.least_generators,
        "move_below": routing.move_below,
    }
