"""The replicas of a router: which there are, which serve, and what is reserved on each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from titan_rl.core.calls.bounded import limited
from titan_rl.core.calls.user_code import reason
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router.replica import GaugedReplica, Replica, ReplicaCalls
from titan_rl.generation.router.strategies import Strategy
from titan_rl.generation.types import GaugeSummary, PauseMode

logger = logging.getLogger(__name__)


class PooledReplica:
    """One replica as the router sees it. Only the router and its parts change it.

    `load` is an estimate in tokens: prompt and token budget of every request sent and not yet answered.
    """

    def __init__(self, handle: Replica, cancel_s: float) -> None:
        self.handle = handle
        self.calls = ReplicaCalls(handle, cancel_s)
        self.name = handle.name
        self.load = 0  # tokens
        self.num_requests = 0
        self.idle = asyncio.Event()  # set while num_requests is 0
        self.idle.set()
        self.serving = False  # the strategy may choose it
        self.draining = False  # out of service for a pull, healthy
        self.removed = False  # for good
        self.version: int | None = None  # pulled through this router; None where that is not known
        self.paused: PauseMode | Literal["unknown"] | None = None  # "unknown" after a call that failed
        self.epoch = 0  # admissions so far: tells a late failure from a new one
        self.failures = 0  # in a row, without an answered request between them
        self.last_error: Exception | None = None
        self.num_served = 0  # answers and messages of tokens so far
        self.heard_at = 0.0  # when the last sign of life came, by the event loop's clock
        self.takes_aborts = True  # so far as the last one told
        self.pulling = asyncio.Lock()
        self.pausing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"PooledReplica({self.name!r}, load={self.load}, serving={self.serving}, version={self.version})"

    def hear(self, *, served: bool = False) -> None:
        """A sign of life has come, or more than that: tokens or an answer."""
        self.num_served += served
        self.heard_at = asyncio.get_running_loop().time()

    def reserve(self, cost: int) -> None:
        """Charge a request. `Reservation` is the only caller, so that each is released once."""
        if not self.num_requests:
            self.idle.clear()
        self.num_requests += 1
        self.load += cost

    def release(self, cost: int) -> None:
        self.num_requests -= 1
        self.load -= cost
        assert self.load >= 0
        assert self.num_requests >= 0
        if not self.num_requests:
            self.idle.set()


class Pool:
    """Members by name, kept in step with the strategy that chooses among those in service.

    Args:
        least: fewer in service are not enough. One that drains for a pull counts: it comes back.
    """

    def __init__(self, handles: Iterable[Replica], strategy: Strategy, cancel_s: float, least: int = 1) -> None:
        if least < 1:
            raise ValueError(f"the least number of replicas is {least!r}; it must be at least 1")
        strategy.belong_to(self)
        self.least = least
        self.strategy = strategy
        self._cancel_s = cancel_s
        self.serving = asyncio.Event()  # set while at least one replica serves
        self.enough = asyncio.Event()  # set while so many do that requests are sent
        self.last_error: Exception | None = None  # of the replica withdrawn last
        self.on_room: Callable[[], None] | None = None  # told when a replica comes into service, or has a request less
        self._replicas: dict[str, PooledReplica] = {}
        self._num_serving = 0
        for handle in handles:
            self.admit(self.add(handle))

    def __iter__(self) -> Iterator[PooledReplica]:
        return iter(tuple(self._replicas.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._replicas

    def add(self, handle: Replica) -> PooledReplica:
        """A new replica, not yet in service.

        Raises:
            ValueError: the name is taken.
        """
        if handle.name in self._replicas:
            raise ValueError(f"replica name {handle.name!r} is taken; remove that replica first, or choose another")
        replica = self._replicas[handle.name] = PooledReplica(handle, self._cancel_s)
        return replica

    def remove(self, name: str) -> PooledReplica:
        """Take a replica out for good.

        Raises:
            ValueError: there is none of that name.
        """
        replica = self.find(name)
        self.withdraw(replica)
        del self._replicas[name]
        replica.removed = True
        return replica

    def find(self, name: str) -> PooledReplica:
        """
        Raises:
            ValueError: there is none of that name.
        """
        if name not in self._replicas:
            raise ValueError(f"no replica {name!r}; there are {sorted(self._replicas)}")
        return self._replicas[name]

    def admit(self, replica: PooledReplica) -> None:
        """Into service. Does nothing for one that serves already or was removed."""
        if replica.serving or replica.removed:
            return
        replica.serving, replica.draining = True, False
        replica.epoch += 1
        self._num_serving += 1
        self.strategy.admit(replica)
        self._note()
        self.has_room()

    def withdraw(self, replica: PooledReplica, *, draining: bool = False) -> None:
        """Out of service; its running requests are not touched.

        Args:
            draining: it is healthy, and they finish.
        """
        was_serving, replica.serving, replica.draining = replica.serving, False, draining
        if was_serving:
            self._num_serving -= 1
            self.strategy.withdraw(replica)
        self._note()

    def trouble(self) -> str | None:
        """Why there are not enough replicas; None where there are."""
        if self.enough.is_set():
            return None
        count, serving = len(self._replicas), self._num_serving
        if serving:
            are = "generator serves" if serving == 1 else "generators serve"
            return f"{serving} {are}, and {self.least} are the least"
        return f"none of {count} generators is in service" if count else "there is no generator"

    def _note(self) -> None:
        num_draining = sum(replica.draining for replica in self)
        _set(self.serving, self._num_serving > 0)
        _set(self.enough, self._num_serving > 0 and self._num_serving + num_draining >= self.least)

    def choose(self, request: EngineRequest) -> Reservation:
        """A reservation of what the request may come to, on the replica the strategy prefers. At least one serves."""
        replica = self.strategy.choose(request.session_id, request.cost)
        assert isinstance(replica, PooledReplica)
        assert replica.serving
        return self.reserve(replica, request)

    def reserve(self, replica: PooledReplica, request: EngineRequest) -> Reservation:
        return Reservation(replica, request.cost, self)

    def has_room(self) -> None:
        if self.on_room is not None:
            self.on_room()

    async def close(self, limit_s: float) -> None:
        """Take all replicas out for good and close them. What one raises is logged; one that takes longer is left."""
        await asyncio.gather(*(_close(self.remove(replica.name), limit_s) for replica in self))


async def _close(replica: PooledReplica, limit_s: float) -> None:
    try:
        async with limited(limit_s, "the close"):
            await replica.calls.close()
    except Exception as error:
        logger.warning("replica %s did not close: %r", replica.name, error)


def _set(event: asyncio.Event, is_set: bool) -> None:
    if is_set:
        event.set()
    else:
        event.clear()


class Reservation:
    """Tokens reserved on a replica from the choice on; leaving the `with` block gives them back, or `give_back` where
    none is entered."""

    __slots__ = ("_cost", "_pool", "replica")

    def __init__(self, replica: PooledReplica, cost: int, pool: Pool) -> None:
        self.replica = replica
        self._cost = cost
        self._pool = pool
        replica.reserve(cost)

    def __enter__(self) -> PooledReplica:
        return self.replica

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.give_back()

    def give_back(self) -> None:
        self.replica.release(self._cost)
        self._pool.strategy.released(self.replica)
        self._pool.has_room()


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A snapshot for metrics: `ReplicaStatus("generator_0", True, 3, 1200, 4, None)`."""

    name: str
    serving: bool
    version: int | None
    load: int  # tokens
    num_requests: int
    last_error: str | None
    gauges: GaugeSummary | None = None  # of its engine, between its last two pulls

    @classmethod
    def of(cls, replica: PooledReplica) -> ReplicaStatus:
        error = None if replica.last_error is None or replica.serving else reason(replica.last_error)
        gauges = replica.handle.gauges if isinstance(replica.handle, GaugedReplica) else None
        return cls(replica.name, replica.serving, replica.version, replica.load, replica.num_requests, error, gauges)
