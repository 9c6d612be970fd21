"""Messages between a router and its shards: small plain data, delivered in order."""

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
        serving: Whether the replica is in service.
        draining: Whether the replica is out of service but healthy, and comes back.
        removed: Whether the replica is gone, so that its requests continue elsewhere.
        version: Version that the replica has; None if it is unknown.
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
        loads: Loads of all shards together, without replicas that have no load.
        versions: Versions of all replicas; None if a version is unknown.
        num_shards: Number of shards.
        shard: Number of the receiving shard, counted from 0.
        turn: Number of the division of the replicas into slices.
    """

    loads: Mapping[str, Load]
    versions: Mapping[str, int | None]
    num_shards: int
    shard: int
    turn: int

    def own_slice(self, names: Iterable[str]) -> set[str]:
        """Replicas on which the receiving shard places new requests in this turn. Each slice has a random one of the
        least loaded replicas, a random one of the next, and so on, so that over the turns all replicas are compared
        with each other. If there are fewer replicas than shards, several shards share a slice.

        Args:
            names: Names of the replicas in service.
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
        name: Name of the replica.
        seconds: Time limit of the wait.
        abort: Whether to end the requests that are left after that time.
    """

    name: str
    seconds: float
    abort: bool


@dataclass(frozen=True, slots=True)
class TellLoad:
    """Request for the present load of a shard."""


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """End requests with the tokens they have; None stands for all that are in flight."""

    request_ids: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ForHeld:
    """Message of the router of a held replica to its own shard in the receiving process. It is not numbered with the
    other messages.

    Attributes:
        hold: Number of the hold.
        number: Number of the message among those of the held replica's router.
        message: Message to that router's shard.
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
        loads: Loads by replica name, without replicas that have no load.
        num_tokens: Number of tokens so far of the requests in flight.
        num_moved: Number of requests that have moved so far; None if requests do not move.
        num_requests: Number of requests in flight, including those that wait for a replica.
        most_requests: Largest number of requests in flight since the last report of the load.
        num_answered: Number of requests that have been answered so far.
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
        aborted: Ids of requests that were ended early.
        cancelled: Ids of aborted requests that did not return in time, and lost their tokens.
        load: Load of the shard, in the answer to `TellLoad`.
    """

    aborted: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    load: ShardLoad | None = None


@dataclass(frozen=True, slots=True)
class ReplicaFailed:
    """Report that a replica failed in a shard. The shard sends it no requests until the router admits it again."""

    name: str
    identity: int
    epoch: int
    error: TitanRLError  # can be pickled


@dataclass(frozen=True, slots=True)
class HeldFailed:
    """Report that a held replica failed in a shard."""

    hold: int
    failed: ReplicaFailed


FromShard = ReplicaFailed | HeldFailed


class ShardLink(Protocol):
    """Connection of a router to one shard. Compared by identity."""

    @property
    def name(self) -> str:
        """Name of the shard, unique among all shards that the router has ever had."""
        ...

    async def call(self, number: int, message: ToShard) -> Ended:
        """Deliver a message, and return once the shard has carried it out.

        Args:
            number: Number of the message, counted from 0. The shard starts messages in this order.
            message: The message.

        Raises:
            ActorDiedError: the shard has ended.
        """
        ...

    def end(self, reason: str) -> None:
        """End a shard that does not answer in time."""
        ...


@runtime_checkable
class AddressedReplica(Protocol):
    """A replica that shards in other processes can also reach."""

    @property
    def address(self) -> Any:
        """Plain data from which a shard connects to the replica."""
        ...

    def forget(self, shard: str) -> None:
        """End the requests of a shard that has ended, without waiting.

        Args:
            shard: Name of the shard.
        """
        ...
