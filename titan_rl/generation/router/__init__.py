"""Router: many generators behind one `generate`. Plain asyncio, without Monarch."""

from titan_rl.generation.router.control import PauseReport, PullMode, PullReport
from titan_rl.generation.router.pool import ReplicaStatus
from titan_rl.generation.router.replica import Limits, Replica
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.router.strategies import (
    ConsistentHash,
    GroupAffinity,
    LeastLoaded,
    RoundRobin,
    StickySession,
    Strategy,
)
from titan_rl.generation.types import PauseMode

__all__ = [
    "ConsistentHash",
    "GeneratorRouter",
    "GroupAffinity",
    "LeastLoaded",
    "Limits",
    "PauseMode",
    "PauseReport",
    "PullMode",
    "PullReport",
    "Replica",
    "ReplicaStatus",
    "RoundRobin",
    "StickySession",
    "Strategy",
]
