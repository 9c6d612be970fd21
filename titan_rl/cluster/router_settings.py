"""Options of the router of a run or a server, and of its shards."""

from __future__ import annotations

from typing import Any

from titan_rl.config.sections import GenerationConfig, RoutingConfig, StateDictConfig
from titan_rl.generation.router.replica import Limits

SHARD_S = 600.0
"""Longest time that a shard takes to follow the router. Environments may block the event loop of their worker."""


def router_options(
    generation: GenerationConfig, routing: RoutingConfig, statedict: StateDictConfig, wait_s: float
) -> dict[str, Any]:
    """Keyword arguments of `GeneratorRouter`, except the strategy.

    Args:
        wait_s: Longest time that requests wait for enough generators.
    """
    return {
        "stall_timeout_s": generation.stall_timeout_s,
        "limits": Limits(pull_s=statedict.pull_timeout_s, no_replica_s=wait_s, shard_s=SHARD_S),
        "least_replicas": generation.least_generators,
        "move_below": routing.move_below,
    }
