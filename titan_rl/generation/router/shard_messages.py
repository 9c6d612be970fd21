"""Messages between a router and its shards: plain data, small, and in order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from titan_rl.core.errors import TitanRLError
from titan_rl.generation.types import PauseMode

Load = tuple[int, int]
"""Tokens reserved, and requests in flight."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """State of one replica, as the router decided it.

    Attributes:
        identity: Distinguishes a replica from a later one with the same name.
        epoch: Number of admissions so far. A failure that a shard reports names the epoch in which it occurred.
        removed: The replica is gone, and its requests continue elsewhere.
        address: Plain data from which a shard connects to the replica; None if the shard has received it.
    """

    name: str
    identity: int
    epoch: int
    serving: bool
    draining: bool
    removed: bool
    version: int | None
    address: Any = None


@dataclass(frozen=True, slots=True)
class Update:
    """New states of replicas."""

    replicas: tuple[ReplicaState, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """First message to a shard: every replica, and the present pause."""

    replicas: tuple[ReplicaState, ...]
    mode: PauseMode | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Load and version of the replicas, by name.

    Attributes:
        loads: Of all shards together, without replicas that have none.
        num_shards: Shards whose loads these are.
        shard: Number of the receiver, from 0.
        turn: Number of the division of the replicas into slices.
    """

    loads: Mapping[str, Load]
    versions: Mapping[str, int | None]
    num_shards: int
    shard: int
    turn: int

    def own_slice(self, names: Iterable[str]) -> set[str]:
        """Replicas on which the receiver places new requests in this turn. Each slice has one of the least loaded
        replicas, one of the next, and so on, drawn at random, so that over the turns all replicas are compared with
        each other. With fewer replicas than shards, several have one slice.

        Args:
            names: Of the replicas in service.
        """
        draws = random.Random(self.turn)
        order = sorted(names)
        draws.shuffle(order)
        order.sort(key=lambda name: self.loads.get(name, (0, 0)))
        num_slices = max(1, min(self.num_shards, len(order)))
        own: set[str] = set()
        for start in range(0, len(order), num_slices):
            alike: list[str | None] = [*order[start : start + num_slices]]
            alike += [None] * (num_slices - len(alike))
            draws.shuffle(alike)
            if (name := alike[self.shard % num_slices]) is not None:
                own.add(name)
        return own


@dataclass(frozen=True, slots=True)
class PauseShard:
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class ResumeShard:
    pass


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait until a replica runs no request of the shard.

    Attributes:
        seconds: Limit of the wait.
        abort: End the requests that are left then.
    """

    name: str
    seconds: float
    abort: bool


@dataclass(frozen=True, slots=True)
class TellLoad:
    """Answer with the present load."""


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """End requests with the tokens they have; None stands for all that are in flight."""

    request_ids: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ForHeld:
    """A message of the router of a replica that is held at a version, to the shard of that router in the same process.
    It is not numbered with the others.

    Attributes:
        hold: Number of the hold.
        number: Of the message, in that router.
    """

    hold: int
    number: int
    message: ToShard


@dataclass(frozen=True, slots=True)
class Release:
    """End of a hold."""

    hold: int


ToShard = Update | Join | Totals | PauseShard | ResumeShard | Drain | AbortRequests | TellLoad | ForHeld | Release


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """Load of a shard.

    Attributes:
        loads: By the replicas' names, without replicas that have none.
        num_tokens: Tokens so far of the requests in flight.
        num_moved: Requests that have moved so far; None if requests do not move.
        num_requests: In flight, including those that wait for a replica.
        most_requests: Most of them at once since the load was told before.
        num_answered: Requests that have been answered so far.
    """

    loads: Mapping[str, Load] = field(default_factory=dict[str, Load])
    num_tokens: int = 0
    num_moved: int | None = None
    num_requests: int = 0
    most_requests: int = 0
    num_answered: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """Answer of a shard: the message has been carried out.

    Attributes:
        load: For `TellLoad`.
        aborted: Ids of requests that were ended early.
        cancelled: Those of them that did not return in time, and lost their tokens.
    """

    aborted: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    load: ShardLoad | None = None


@dataclass(frozen=True, slots=True)
class ReplicaFailed:
    """A replica failed in a shard, which sends it nothing until it is admitted again."""

    name: str
    identity: int
    epoch: int
    error: TitanRLError  # which pickles


@dataclass(frozen=True, slots=True)
class HeldFailed:
    """A replica that is held at a version failed in a shard."""

    hold: int
    failed: ReplicaFailed


FromShard = ReplicaFailed | HeldFailed


class ShardLink(Protocol):
    """Connection of a router to one shard. Compared by identity."""

    @property
    def name(self) -> str:
        """Unique among all shards that the router has ever had."""
        ...

    async def call(self, number: int, message: ToShard) -> Ended:
        """Deliver a message, and return once the shard has carried it out.

        Args:
            number: Of the message, from 0: the shard begins them in order.

        Raises:
            ActorDiedError: the shard has ended.
        """
        ...

    def end(self, reason: str) -> None:
        """End a shard that does not answer in time."""
        ...


@runtime_checkable
class AddressedReplica(Protocol):
    """A replica that shards in other processes can reach, too."""

    @property
    def address(self) -> Any:
        """Plain data from which a shard connects to it."""
        ...

    def forget(self, shard: str) -> None:
        """End the requests of a shard that has ended, by its name. Does not wait."""
        ...
