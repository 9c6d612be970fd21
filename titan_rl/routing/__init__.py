"""Many generators behind one `generate`. Plain asyncio: an actor only wraps it."""

from titan_rl.generation.types import PauseMode
from titan_rl.routing.affinity import ConsistentHash, GroupAffinity
from titan_rl.routing.limits import Limits
from titan_rl.routing.member import MemberStatus
from titan_rl.routing.pause import PauseReport
from titan_rl.routing.pull import PullMode, PullReport
from titan_rl.routing.replica import Replica
from titan_rl.routing.router import GeneratorRouter
from titan_rl.routing.strategies import LeastLoaded, RoundRobin, StickySession, Strategy

__all__ = [
    "ConsistentHash",
    "GeneratorRouter",
    "GroupAffinity",
    "LeastLoaded",
    "Limits",
    "MemberStatus",
    "PauseMode",
    "PauseReport",
    "PullMode",
    "PullReport",
    "Replica",
    "RoundRobin",
    "StickySession",
    "Strategy",
]
