"""The replicas of a router: which there are, which serve, and what is reserved on each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from types import TracebackType

from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router.pooled_replica import PooledReplica
from titan_rl.generation.router.replica import Replica
from titan_rl.generation.router.strategies import Strategy


class Pool:
    """Members by name, kept in step with the strategy that chooses among those in service."""

    def __init__(self, handles: Iterable[Replica], strategy: Strategy, cancel_s: float) -> None:
        self.strategy = strategy
        self._cancel_s = cancel_s
        self.serving = asyncio.Event()  # set while at least one replica serves
        self.last_error: Exception | None = None  # of the replica withdrawn last
        self._replicas: dict[str, PooledReplica] = {}
        self._num_serving = 0
        for handle in handles:
            self.admit(self.add(handle))

    def __iter__(self) -> Iterator[PooledReplica]:
        return iter(tuple(self._replicas.values()))

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
        if name not in self._replicas:
            raise ValueError(f"no replica {name!r}; there are {sorted(self._replicas)}")
        self.withdraw(self._replicas[name])
        replica = self._replicas.pop(name)
        replica.removed = True
        return replica

    def admit(self, replica: PooledReplica) -> None:
        """Into service. Does nothing for one that serves already or was removed."""
        if replica.serving or replica.removed:
            return
        replica.serving, replica.draining = True, False
        replica.epoch += 1
        self._num_serving += 1
        self.strategy.admit(replica)
        self.serving.set()

    def withdraw(self, replica: PooledReplica) -> None:
        """Out of service; its running requests are not touched."""
        if not replica.serving:
            return
        replica.serving = False
        self._num_serving -= 1
        self.strategy.withdraw(replica)
        if not self._num_serving:
            self.serving.clear()

    def choose(self, request: EngineRequest) -> Reservation:
        """A reservation of what the request may come to on the replica the strategy prefers. At least one serves."""
        replica = self.strategy.choose(request.session_id, request.cost)
        assert isinstance(replica, PooledReplica)
        assert replica.serving
        return Reservation(replica, request.cost, self.strategy)


class Reservation:
    """Tokens reserved on a replica from the choice on; leaving the `with` block gives them back."""

    __slots__ = ("_cost", "_strategy", "replica")

    def __init__(self, replica: PooledReplica, cost: int, strategy: Strategy) -> None:
        self.replica = replica
        self._cost = cost
        self._strategy = strategy
        replica.reserve(cost)

    def __enter__(self) -> PooledReplica:
        return self.replica

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.replica.release(self._cost)
        self._strategy.released(self.replica)
