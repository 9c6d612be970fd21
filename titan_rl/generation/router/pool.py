"""The replicas of a router: which there are, which serve, and what is reserved on each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from types import TracebackType

from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router.member import Member
from titan_rl.generation.router.replica import Replica
from titan_rl.generation.router.strategies import Strategy


class Pool:
    """Members by name, kept in step with the strategy that chooses among those in service."""

    def __init__(self, replicas: Iterable[Replica], strategy: Strategy, cancel_s: float) -> None:
        self.strategy = strategy
        self._cancel_s = cancel_s
        self.serving = asyncio.Event()  # set while at least one member serves
        self.last_error: Exception | None = None  # of the member withdrawn last
        self._members: dict[str, Member] = {}
        self._num_serving = 0
        for replica in replicas:
            self.admit(self.add(replica))

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def add(self, replica: Replica) -> Member:
        """A new member, not yet in service.

        Raises:
            ValueError: the name is taken.
        """
        if replica.name in self._members:
            raise ValueError(f"replica name {replica.name!r} is taken; remove that replica first, or choose another")
        member = self._members[replica.name] = Member(replica, self._cancel_s)
        return member

    def remove(self, name: str) -> Member:
        """Take a member out for good.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self._members:
            raise ValueError(f"no replica {name!r}; there are {sorted(self._members)}")
        self.withdraw(self._members[name])
        member = self._members.pop(name)
        member.removed = True
        return member

    def admit(self, member: Member) -> None:
        """Into service. Does nothing for one that serves already or was removed."""
        if member.serving or member.removed:
            return
        member.serving, member.draining = True, False
        member.epoch += 1
        self._num_serving += 1
        self.strategy.admit(member)
        self.serving.set()

    def withdraw(self, member: Member) -> None:
        """Out of service; its running requests are not touched."""
        if not member.serving:
            return
        member.serving = False
        self._num_serving -= 1
        self.strategy.withdraw(member)
        if not self._num_serving:
            self.serving.clear()

    def choose(self, request: EngineRequest) -> Reservation:
        """A reservation of what the request may come to on the member the strategy prefers. At least one serves."""
        member = self.strategy.choose(request.session_id, request.cost)
        assert isinstance(member, Member)
        assert member.serving
        return Reservation(member, request.cost, self.strategy)


class Reservation:
    """Tokens reserved on a member from the choice on; leaving the `with` block gives them back."""

    __slots__ = ("_cost", "_strategy", "member")

    def __init__(self, member: Member, cost: int, strategy: Strategy) -> None:
        self.member = member
        self._cost = cost
        self._strategy = strategy
        member.reserve(cost)

    def __enter__(self) -> Member:
        return self.member

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.member.release(self._cost)
        self._strategy.released(self.member)
