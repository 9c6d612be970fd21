"""The strategies by name: the library's own, or the user's as "module:function"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan_rl.core.calls.imports import find_function
from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import ConfigError
from titan_rl.generation.router.affinity import ConsistentHash, GroupAffinity
from titan_rl.generation.router.strategies import LeastLoaded, RoundRobin, StickySession, Strategy

StrategyFn = Callable[[int], Strategy]
"""Makes the strategy of one router, given how many sessions it may remember. A class is one, too."""

BY_NAME: dict[str, StrategyFn] = {
    "sticky": lambda max_sessions: StickySession(LeastLoaded(), max_sessions),
    "group_affinity": lambda max_sessions: StickySession(GroupAffinity(LeastLoaded()), max_sessions),
    "consistent_hash": lambda _: ConsistentHash(),
    "least_loaded": lambda _: LeastLoaded(),
    "round_robin": lambda _: RoundRobin(),
}
"""The library's own that `routing.strategy` names."""


def find_strategy(name: str) -> StrategyFn:
    """What makes the strategies that `routing.strategy` names.

    Raises:
        ConfigError: there is none of that name.
    """
    return find_function("routing.strategy", name, BY_NAME)


def make_strategy(name: str, max_sessions: int) -> Strategy:
    """The strategy that `routing.strategy` names, for one router.

    Raises:
        ConfigError: there is none of that name, or it cannot be made.
    """
    make = find_strategy(name)
    try:
        strategy: Any = make(max_sessions)
    except Exception as error:
        raise ConfigError(f"routing.strategy = {name!r} failed: {describe(error)}") from error
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"routing.strategy = {name!r} gave {strategy!r}; it must give a Strategy for its router")
    return strategy
