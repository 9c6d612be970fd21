"""Router: many generators behind one `generate`. Plain asyncio, without Monarch."""

from titan_rl.generation.router.control import PauseReport as PauseReport
from titan_rl.generation.router.control import PullMode as PullMode
from titan_rl.generation.router.control import PullReport as PullReport
from titan_rl.generation.router.pool import ReplicaStatus as ReplicaStatus
from titan_rl.generation.router.replica import Limits as Limits
from titan_rl.generation.router.replica import Replica as Replica
from titan_rl.generation.router.router import GeneratorRouter as GeneratorRouter
from titan_rl.generation.router.strategies import ConsistentHash as ConsistentHash
from titan_rl.generation.router.strategies import GroupAffinity as GroupAffinity
from titan_rl.generation.router.strategies import LeastLoaded as LeastLoaded
from titan_rl.generation.router.strategies import RoundRobin as RoundRobin
from titan_rl.generation.router.strategies import StickySession as StickySession
from titan_rl.generation.router.strategies import Strategy as Strategy
from titan_rl.generation.types import PauseMode as PauseMode
