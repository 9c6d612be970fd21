"""Control of a router's shards: messages, which are small plain data and delivered in order, updates on replicas, and
operations that every shard acknowledges."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, runtime_checkable

from titan_rl.core.calls.bounded import limited
from titan_rl.core.errors import ActorDiedError, ConfigError, TitanRLError
from titan_rl.generation.router.pool import Pool, PooledReplica, Service
from titan_rl.generation.types import PauseMode

logger = logging.getLogger(__name__)

Load = tuple[int, int]
"""Tokens reserved, and requests in flight."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """State of one replica, as the router decided it.

    Attributes:
        identity: Distinguishes a replica from a later one with the same name.
        epoch: Number of admissions so far. A failure that a shard reports names the epoch in which it occurred.
        service: Service of the replica. The requests of a removed one continue on other replicas.
        version: Version that the replica has; None if it is unknown.
        address: Plain data from which a shard connects to the replica; None if the shard has received it.
    """

    name: str
    identity: int
    epoch: int
    service: Service
    version: int | None
    address: Any = None


@dataclass(frozen=True, slots=True)
class Update:
    """New states of replicas; in the first message to a shard those of all replicas."""

    replicas: tuple[ReplicaState, ...]


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
class ForDedicated:
    """Message of the router of a dedicated replica to its own shard in the receiving process. It is not numbered with
    the other messages.

    Attributes:
        dedication: Number of the dedication.
        number: Number of the message among those of the dedicated replica's router.
        message: Message to that router's shard.
    """

    dedication: int
    number: int
    message: ToShard


@dataclass(frozen=True, slots=True)
class EndDedication:
    """End of the dedication with this number."""

    dedication: int


ToShard = Update | Totals | PauseShard | ResumeShard | Drain | AbortRequests | TellLoad | ForDedicated | EndDedication


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
class DedicatedFailed:
    """Report that a dedicated replica failed in a shard."""

    dedication: int
    failed: ReplicaFailed


FromShard = ReplicaFailed | DedicatedFailed


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


@dataclass(slots=True)
class _Shard:
    numbers: count[int] = field(default_factory=count)
    known: set[int] = field(default_factory=set[int])  # identities of the replicas whose address the shard has
    load: ShardLoad = field(default_factory=ShardLoad)
    updates: set[asyncio.Task[Ended]] = field(default_factory=set[asyncio.Task[Ended]])  # not acknowledged yet


class Shards:
    """Shards of a router: other routers over the same replicas, each for its own requests.

    The router decides which replicas serve, pulls, pauses and resumes them. A shard follows these decisions, dispatches
    requests by itself, and reports failures. Messages to a shard are carried out in order, and an operation is complete
    once each shard has acknowledged it. A shard that ends, or does not answer in time, takes its requests with it and
    delays no other shard.

    The load that a strategy sees includes the load of the other shards `Limits.share_s` ago. If all shards chose the
    emptiest replicas of the same outdated list, they would overload them. So each shard places new requests on a slice
    of the replicas that no other shard has at that time, and gets another slice after `Limits.share_s`. Strategies that
    ignore the load are unaffected.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._limits = pool.limits
        self._shards: dict[ShardLink, _Shard] = {}
        self._changed: dict[PooledReplica, None] = {}  # replicas changed since the last update, in order
        self._shared: tuple[dict[str, Load], dict[str, int | None]] | None = None  # loads and versions, in the shards
        self._turn = 0  # number of divisions of the replicas into slices
        self._is_sharing = False
        self._late: set[ShardLink] = set()  # shards that have not answered the last `TellLoad`
        self._most_requests = 0  # largest number of requests at once since `take_most_requests`
        self._moved_before, self._answered_before = 0, 0  # requests of shards that have ended

    @property
    def links(self) -> tuple[ShardLink, ...]:
        return tuple(self._shards)

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far of all requests in flight in shards."""
        return sum(shard.load.num_tokens for shard in self._shards.values())

    @property
    def num_moved(self) -> int:
        """Number of requests that have moved so far, also in shards that have ended."""
        return self._moved_before + sum(shard.load.num_moved or 0 for shard in self._shards.values())

    @property
    def num_requests(self) -> int:
        """Number of requests in flight in shards, including those that wait for a replica."""
        return sum(shard.load.num_requests for shard in self._shards.values())

    @property
    def num_answered(self) -> int:
        """Number of requests that have been answered so far, also in shards that have ended."""
        return self._answered_before + sum(shard.load.num_answered for shard in self._shards.values())

    def take_most_requests(self) -> int:
        """Largest number of requests in flight since the last call. For each interval of `Limits.share_s`, the maxima
        of the shards are added up."""
        most, self._most_requests = self._most_requests, self.num_requests
        return most

    async def join(self, link: ShardLink, mode: PauseMode | None) -> None:
        """Add a shard. It may send requests once this returns.

        Raises:
            ConfigError: a replica cannot be reached from other processes.
            ActorDiedError: the shard has ended.
        """
        self._flush()
        self._pool.on_change = self._note
        shard = _Shard()
        states = self._states(self._pool, shard)
        self._shards[link] = shard
        if mode is not None:  # before it has replicas
            self._begin(link, PauseShard(mode))
        await asyncio.shield(self._begin(link, Update(states)))
        if link not in self._shards:
            raise ActorDiedError(f"{link.name} did not join the router")
        self._shared = None  # the new shard has no totals yet
        self._share()
        if not self._is_sharing:
            self._is_sharing = True
            self._pool.tasks.start(self._keep_sharing(), "share the load of shards")

    def leave(self, link: ShardLink) -> None:
        """Forget a shard and its load. Does nothing if the shard has left already."""
        if (shard := self._shards.pop(link, None)) is None:
            return
        self._moved_before += shard.load.num_moved or 0
        self._answered_before += shard.load.num_answered
        self._add_up()
        for replica in self._pool:
            if isinstance(replica.handle, AddressedReplica):
                replica.handle.forget(link.name)

    async def end_dedication(self, dedication: int) -> None:
        await self._call_all(EndDedication(dedication))

    def receive(self, link: ShardLink, report: ReplicaFailed) -> None:
        """Handle the report of a shard. Reports of shards that have left are ignored."""
        if link in self._shards and report.name in self._pool:
            replica = self._pool.find(report.name)
            if replica.identity == report.identity:
                self._pool.quarantine(replica, report.error, report.epoch)

    async def settle(self) -> None:
        """Return once each shard follows all decisions so far."""
        self._flush()
        if updates := [update for shard in self._shards.values() for update in shard.updates]:
            await asyncio.wait(updates)

    async def pause(self, mode: PauseMode) -> Ended:
        return await self._call_all(PauseShard(mode), self._limits.finish_s + self._limits.abort_s)

    async def resume(self) -> None:
        await self._call_all(ResumeShard())

    async def drain(self, replica: PooledReplica, seconds: float, *, abort: bool) -> Sequence[str]:
        """Wait until no shard runs a request on a replica that is out of service, for at most `seconds`.

        Args:
            abort: Whether to abort the requests that are left after that time.

        Returns:
            Ids of the requests that were aborted.
        """
        longest_s = seconds + self._limits.paused_s + self._limits.abort_s  # a pause stops the clock of the drain
        self._flush()
        return (await self._call_all(Drain(replica.name, seconds, abort), longest_s)).aborted

    async def abort(self, request_ids: Iterable[str] | None) -> Ended:
        ids = None if request_ids is None else tuple(request_ids)
        return await self._call_all(AbortRequests(ids), self._limits.abort_s)

    def _note(self, replica: PooledReplica) -> None:
        """Send a change to the shards at the end of this iteration of the event loop, together with all others."""
        if not self._changed:
            asyncio.get_running_loop().call_soon(self._flush)
        self._changed[replica] = None

    def _flush(self) -> None:
        changed, self._changed = self._changed, {}
        if not changed:
            return
        for link, shard in tuple(self._shards.items()):
            if states := self._states(changed, shard):
                update = self._begin(link, Update(states))
                shard.updates.add(update)
                update.add_done_callback(shard.updates.discard)

    def _states(self, replicas: Iterable[PooledReplica], shard: _Shard) -> tuple[ReplicaState, ...]:
        states: list[ReplicaState] = []
        for replica in replicas:
            identity, address = replica.identity, None
            if identity not in shard.known:
                if replica.removed:
                    continue
                if not isinstance(replica.handle, AddressedReplica):
                    raise ConfigError(
                        f"replica {replica.name!r} has no address: rollout workers cannot reach it; set "
                        "rollout.num_workers to 0"
                    )
                shard.known.add(identity)
                address = replica.handle.address
            states.append(
                ReplicaState(replica.name, identity, replica.epoch, replica.service, replica.version, address)
            )
        return tuple(states)

    async def _keep_sharing(self) -> None:
        """Exchange loads at an interval. A late shard delays no other one; its last reported load stays valid."""
        pending: dict[asyncio.Task[Ended], ShardLink] = {}
        while True:
            await asyncio.sleep(self._limits.share_s)
            self._late = set(pending.values())
            pending |= {self._begin(link, TellLoad()): link for link in self.links if link not in self._late}
            done, _ = await asyncio.wait(pending, timeout=self._limits.share_s) if pending else ((), ())
            for answer in done:
                shard, load = self._shards.get(pending.pop(answer)), answer.result().load
                if shard is not None and load is not None:
                    shard.load = load
            most = sum(shard.load.most_requests for shard in self._shards.values())
            self._most_requests = max(self._most_requests, most)
            self._share()

    def _share(self) -> None:
        if not self._shards:
            return
        totals = self._add_up(), {replica.name: replica.version for replica in self._pool}
        if totals == self._shared and not totals[0]:
            return
        self._shared = totals
        self._turn += 1
        for index, link in enumerate(self.links):
            if link not in self._late:
                self._begin(link, Totals(*totals, len(self._shards), index, self._turn))

    def _add_up(self) -> dict[str, Load]:
        """Add up the load of all shards on each replica. The load also counts for this router's own strategy."""
        loads: dict[str, Load] = {}
        for shard in self._shards.values():  # dozens, with thousands of replicas each
            for name, (num_tokens, num_requests) in shard.load.loads.items():
                tokens, requests = loads.get(name, (0, 0))
                loads[name] = (tokens + num_tokens, requests + num_requests)
        for replica in self._pool:
            self._pool.note_other_shards(replica, loads.get(replica.name, (0, 0)))
        return loads

    def _begin(self, link: ShardLink, message: ToShard, longest_s: float = 0.0) -> asyncio.Task[Ended]:
        """Send a message. It is sent even if the caller is cancelled, because the shard carries messages out in order.

        Args:
            longest_s: Time that the shard may need to carry out the message.
        """
        number = next(self._shards[link].numbers)
        delivering = self._deliver(link, number, message, longest_s + self._limits.shard_s)
        return self._pool.tasks.start(delivering, f"tell {link.name}")

    async def _call_all(self, message: ToShard, longest_s: float = 0.0) -> Ended:
        calls = [asyncio.shield(self._begin(link, message, longest_s)) for link in tuple(self._shards)]
        answers = await asyncio.gather(*calls)
        return Ended(
            tuple(request_id for answer in answers for request_id in answer.aborted),
            tuple(request_id for answer in answers for request_id in answer.cancelled),
        )

    async def _deliver(self, link: ShardLink, number: int, message: ToShard, limit_s: float) -> Ended:
        """Send a message and wait for its acknowledgement. A shard that does not acknowledge it is removed."""
        try:
            async with limited(limit_s, f"the acknowledgement of {type(message).__name__}"):
                return await link.call(number, message)
        except Exception as error:
            if link in self._shards:
                logger.warning("shard %s is removed: %r", link.name, error)
                self.leave(link)
                link.end(f"it did not follow the router: {error!r}")
            return Ended()
