"""Replicas of a router: their state, service and load, and their recovery after a failure."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Literal

from titan_rl.core.calls.bounded import limited
from titan_rl.core.calls.user_code import reason
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router.replica import BackgroundTasks, GaugedReplica, Limits, Replica, ReplicaCalls
from titan_rl.generation.router.strategies import Strategy
from titan_rl.generation.types import GaugeSummary, PauseMode

logger = logging.getLogger(__name__)

OnReplicaFailed = Callable[[Replica, Exception], None]

_identities = count()

AWAY = 1 << 40
"""Tokens added to the load of a replica that is in another shard's slice at present."""


class Service(StrEnum):
    """Service of a replica in a router."""

    SERVING = "serving"  # the strategy may choose it
    DRAINING = "draining"  # healthy; finishes its requests, and then pulls and serves again
    OUT = "out"  # until it has pulled the current version
    REMOVED = "removed"  # permanently


class PooledReplica:
    """State of one replica, which only the router and its parts change.

    `load` is an estimate in tokens: prompt and token budget of every request sent and not yet answered, also by other
    shards.
    """

    def __init__(self, handle: Replica, cancel_s: float) -> None:
        self.handle = handle
        self.calls = ReplicaCalls(handle, cancel_s)
        self.name = handle.name
        self.identity = next(_identities)  # distinguishes it from a later replica with the same name
        self.load = 0  # tokens
        self.num_requests = 0
        self.in_other_shards: tuple[int, int] = (0, 0)  # tokens and requests of other shards
        self.load_of_others = 0  # part of `load`
        self.idle = asyncio.Event()  # set while num_requests is 0
        self.idle.set()
        self.service = Service.OUT
        self.version: int | None = None  # pulled through this router; None if unknown
        self.paused: PauseMode | Literal["unknown"] | None = None  # "unknown" after a call that failed
        self.epoch = 0  # number of admissions so far, which distinguishes a late failure from a new one
        self.admitted_at = 0.0  # time of the last admission, by the event loop's clock
        self.failures = 0  # failures in a row, without an answered request or long service between them
        self.last_error: Exception | None = None
        self.num_served = 0  # answers and chunks of tokens so far
        self.last_seen_at = 0.0  # time of the last sign of life, by the event loop's clock
        self.accepts_aborts = True  # whether the last abort succeeded
        self.pulling = asyncio.Lock()
        self.pull_limit: asyncio.Timeout | None = None  # time limit of the pull in flight
        self.pausing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"PooledReplica({self.name!r}, {self.service}, load={self.load}, version={self.version})"

    @property
    def serving(self) -> bool:
        return self.service is Service.SERVING

    @property
    def removed(self) -> bool:
        return self.service is Service.REMOVED

    @property
    def healthy(self) -> bool:
        """Whether the replica serves, or drains and then serves again."""
        return self.service in (Service.SERVING, Service.DRAINING)

    def note_alive(self, *, served: bool = False) -> None:
        """Note a sign of life.

        Args:
            served: Whether the sign brought tokens or an answer.
        """
        self.num_served += served
        self.last_seen_at = asyncio.get_running_loop().time()

    def note_pull_elsewhere(self, pull_s: float) -> None:
        """Note the end of a pull for another router. A pull in flight may have waited for it, and has `pull_s` seconds
        from now on."""
        self.note_alive()
        if self.pull_limit is not None and not self.pull_limit.expired():
            self.pull_limit.reschedule(self.last_seen_at + pull_s)


class Reservation:
    """Tokens reserved on a replica, from construction to the end of the `with` block or to `give_back`."""

    __slots__ = ("_cost", "_pool", "replica")

    def __init__(self, replica: PooledReplica, cost: int, pool: Pool) -> None:
        self.replica = replica
        self._cost = cost
        self._pool = pool
        replica.idle.clear()
        replica.num_requests += 1
        replica.load += cost

    def __enter__(self) -> PooledReplica:
        return self.replica

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Release the tokens. Called once."""
        replica = self.replica
        replica.num_requests -= 1
        replica.load -= self._cost
        assert replica.load >= 0
        assert replica.num_requests >= 0
        if not replica.num_requests:
            replica.idle.set()
        self._pool.strategy.released(replica)
        self._pool.on_room()


class Aborts:
    """Sends aborts to replicas. A failed abort does not quarantine the replica. It is logged once, until an abort
    succeeds again."""

    def __init__(self, tasks: BackgroundTasks, call_s: float) -> None:
        self._tasks = tasks
        self._call_s = call_s
        self._orphans: dict[PooledReplica, list[str]] = {}  # orphans of this iteration of the event loop
        self._unaccepted: dict[PooledReplica, list[str]] = {}  # orphans whose abort failed
        self._maybe_running = Counter[str]()  # all orphans that their replica may still run

    async def send(self, replica: PooledReplica, engine_ids: Sequence[str]) -> bool:
        """Ask a replica to end requests. Returns whether it answered in time."""
        try:
            async with limited(self._call_s, "the abort"):
                await replica.calls.abort(engine_ids)
        except Exception as error:
            if replica.accepts_aborts:
                count = len(engine_ids)
                logger.warning("replica %s did not accept an abort of %d requests: %r", replica.name, count, error)
            replica.accepts_aborts = False
            return False
        replica.accepts_aborts = True
        return True

    def send_soon(self, replica: PooledReplica, engine_id: str) -> None:
        """Abort a request that has no caller any more, because its engine may still run it. Requests of one iteration
        of the event loop share a call, because the loss of a replica orphans many at once."""
        if not self._orphans:
            asyncio.get_running_loop().call_soon(self._send_orphans)
        self._orphans.setdefault(replica, []).append(engine_id)
        self._maybe_running[engine_id] += 1

    def may_run(self, engine_id: str) -> bool:
        """Whether an engine may still run an orphaned request with this id, so that the id must not be reused."""
        return engine_id in self._maybe_running

    def send_again(self, replica: PooledReplica) -> None:
        """Repeat the aborts that did not reach the replica."""
        self._start(replica, ())

    def forget(self, replica: PooledReplica) -> None:
        """Drop the aborts of a removed replica."""
        self._note_ended(self._unaccepted.pop(replica, ()))

    def _send_orphans(self) -> None:
        orphans, self._orphans = self._orphans, {}
        for replica, engine_ids in orphans.items():
            self._start(replica, engine_ids)

    def _start(self, replica: PooledReplica, engine_ids: Sequence[str]) -> None:
        if engine_ids := [*self._unaccepted.pop(replica, ()), *engine_ids]:
            self._tasks.start(self._end_orphans(replica, engine_ids), f"abort {len(engine_ids)} on {replica.name}")

    async def _end_orphans(self, replica: PooledReplica, engine_ids: Sequence[str]) -> None:
        if await self.send(replica, engine_ids) or replica.removed:
            self._note_ended(engine_ids)
        else:  # the engine may still run them
            self._unaccepted.setdefault(replica, []).extend(engine_ids)

    def _note_ended(self, engine_ids: Sequence[str]) -> None:
        """Note that no engine runs these requests any more."""
        for engine_id in engine_ids:
            self._maybe_running[engine_id] -= 1
            if not self._maybe_running[engine_id]:
                del self._maybe_running[engine_id]


class TargetState:
    """Target state of all replicas: the newest version of the weights, and the pause mode.

    Attributes:
        version: Newest requested version, except versions that no replica could load. None before the first pull.
        loaded: Newest version that a replica has loaded.
        mode: Mode of the present pause.
        pinned: Older version that engines which pin versions also hold; replicas that start load it first.
    """

    def __init__(self, limits: Limits) -> None:
        self.version: int | None = None
        self.pinned: int | None = None
        self.loaded: int | None = None
        self.mode: PauseMode | None = None
        self._limits = limits

    def has_version(self, replica: PooledReplica) -> bool:
        """Whether the replica has the target version or a newer one."""
        return self.version is None or (replica.version is not None and replica.version >= self.version)

    def has_mode(self, replica: PooledReplica) -> bool:
        return replica.paused == self.mode

    async def pull(self, replica: PooledReplica) -> None:
        """Bring one replica to the newest version.

        Raises:
            OutOfTimeError: the pull took longer than `pull_s`.
            Exception: raised by the replica.
        """
        async with replica.pulling:
            if replica.version is None and self.pinned is not None and self.version is not None:
                await self._pull(replica, min(self.pinned, self.version))
            while self.version is not None and not self.has_version(replica):
                await self._pull(replica, self.version)

    async def _pull(self, replica: PooledReplica, version: int) -> None:
        async with limited(self._limits.pull_s, f"the pull of version {version}") as replica.pull_limit:
            try:
                replica.version = await replica.calls.pull(version)
            finally:
                replica.pull_limit = None
        self.loaded = max(version, self.loaded or 0)
        replica.note_alive()

    async def pause(self, replica: PooledReplica) -> None:
        """Bring one replica to the pause mode, or resume it.

        Raises:
            OutOfTimeError: a call took longer than `call_s`.
            Exception: raised by the replica.
        """
        async with replica.pausing:
            while not self.has_mode(replica):
                mode, before = self.mode, replica.paused
                replica.paused = "unknown"
                change = "the resume" if mode is None else f'the pause in mode "{mode}"'
                async with limited(self._limits.call_s, change):
                    if before is not None:
                        await replica.calls.resume()
                    if mode is not None:
                        await replica.calls.pause(mode)
                replica.paused = mode


class Pool:
    """Replicas by name. The pool reports their changes to the strategy, which chooses among those in service.

    A replica is quarantined at its first infrastructure failure and recovered in the background. A replica that fails
    again before it has answered a request waits twice as long, so that one that fails fast attracts few requests.

    Args:
        handles: Replicas to begin with.
        strategy: Strategy of the router.
        limits: Time limits.
        tasks: Runs recoveries and aborts.
        on_failed: Called at each quarantine, so that a supervisor can replace the replica.
        least: Smallest number of replicas that must be in service. A replica that drains for a pull counts, because it
            comes back.

    Raises:
        ValueError: `least` is less than 1, the strategy belongs to another router, or two replicas have the same name.
    """

    def __init__(
        self,
        handles: Iterable[Replica],
        strategy: Strategy,
        limits: Limits,
        tasks: BackgroundTasks,
        on_failed: OnReplicaFailed | None,
        least: int,
    ) -> None:
        if least < 1:
            raise ValueError(f"the least number of replicas is {least!r}; it must be at least 1")
        strategy.belong_to(self)
        self.strategy = strategy
        self.limits = limits
        self.tasks = tasks
        self.least = least
        self.aborts = Aborts(tasks, limits.call_s)
        self.target = TargetState(limits)
        self.serving = asyncio.Event()  # set while at least one replica serves
        self.enough = asyncio.Event()  # set while enough replicas serve for requests to be sent
        self.last_error: Exception | None = None  # error of the last failure of any replica
        self.on_room: Callable[[], None] = _ignore  # called when a replica enters service, or a request ends
        self.on_change: Callable[[PooledReplica], None] = _ignore  # called when a replica's service changes
        self.origin = ""  # suffix of engine ids, if several routers send to the same replicas
        self._on_failed = on_failed
        self._replicas: dict[str, PooledReplica] = {}
        self._recovering: set[PooledReplica] = set()
        self._num_serving = 0
        for handle in handles:
            self.admit(self.add(handle))

    def __iter__(self) -> Iterator[PooledReplica]:
        return iter(tuple(self._replicas.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._replicas

    def add(self, handle: Replica) -> PooledReplica:
        """Add a replica, not yet in service.

        Raises:
            ValueError: the name is taken.
        """
        if handle.name in self._replicas:
            raise ValueError(f"replica name {handle.name!r} is taken; remove that replica first, or choose another")
        replica = self._replicas[handle.name] = PooledReplica(handle, self.limits.cancel_s)
        self.on_change(replica)
        return replica

    def remove(self, name: str) -> PooledReplica:
        """Remove a replica permanently.

        Raises:
            ValueError: there is no replica of that name.
        """
        replica = self.find(name)
        del self._replicas[name]
        self.withdraw(replica, Service.REMOVED)
        self.aborts.forget(replica)
        return replica

    def find(self, name: str) -> PooledReplica:
        """Return the replica of a name.

        Raises:
            ValueError: there is no replica of that name.
        """
        if name not in self._replicas:
            raise ValueError(f"no replica {name!r}; there are {sorted(self._replicas)}")
        return self._replicas[name]

    def choose(self, request: EngineRequest) -> Reservation:
        """Reserve the request's maximum number of tokens on the replica that the strategy prefers. At least one replica
        must be in service."""
        replica = self.strategy.choose(request.session_id, request.cost)
        assert isinstance(replica, PooledReplica)
        assert replica.serving
        return Reservation(replica, request.cost, self)

    def admit(self, replica: PooledReplica) -> None:
        """Put a replica into service. Does nothing if it serves already or was removed."""
        if replica.serving or replica.removed:
            return
        replica.service = Service.SERVING
        replica.epoch += 1
        replica.admitted_at = asyncio.get_running_loop().time()
        self._num_serving += 1
        self.strategy.admit(replica)
        self._update_events()
        self.on_change(replica)
        self.on_room()

    def withdraw(self, replica: PooledReplica, service: Service = Service.OUT) -> None:
        """Take a replica out of service; its running requests are not touched.

        Args:
            service: New state of the replica. A removed replica stays removed.
        """
        was_serving = replica.serving
        if not replica.removed:
            replica.service = service
        if was_serving:
            self._num_serving -= 1
            self.strategy.withdraw(replica)
        self._update_events()
        self.on_change(replica)

    def note_other_shards(self, replica: PooledReplica, load: tuple[int, int], *, away: bool = False) -> None:
        """Note the tokens and requests of other shards, which count in the replica's load.

        Args:
            load: Tokens and requests.
            away: Whether the replica is in another shard's slice at present. It then ranks behind all others.
        """
        tokens = load[0] + (AWAY if away else 0)
        grown, replica.in_other_shards, replica.load_of_others = tokens - replica.load_of_others, load, tokens
        replica.load += grown
        if grown < 0:
            self.strategy.released(replica)

    def quarantine(self, replica: PooledReplica, error: Exception, epoch: int | None = None) -> None:
        """Take a replica out of service because of `error`, and recover it in the background.

        Args:
            epoch: Epoch of the replica when the failed call began; a failure from before its last admission is ignored.
        """
        is_out = replica in self._recovering and not replica.serving
        if replica.removed or is_out or (epoch is not None and epoch != replica.epoch):
            return
        if asyncio.get_running_loop().time() - replica.admitted_at > self.limits.max_quarantine_s:
            replica.failures = 0  # it worked, even if only shards have received its answers
        self._note_failure(replica, error)
        logger.warning("replica %s is out of service: %r", replica.name, error)
        self.take_out(replica)
        if self._on_failed is not None:
            try:
                self._on_failed(replica.handle, error)
            except Exception:
                logger.exception("on_replica_failed raised for replica %s", replica.name)

    def take_out(self, replica: PooledReplica) -> None:
        """Take a healthy replica out of service until it has pulled the current version."""
        self.withdraw(replica)
        replica.version = None
        if replica not in self._recovering and not replica.removed:
            self._recovering.add(replica)
            self.tasks.start(self._recover(replica), f"recover {replica.name}")

    async def bring_up(self, replica: PooledReplica) -> None:
        """Put a replica into service with the current weights and pause mode.

        Raises:
            Exception: raised by the replica.
        """
        target = self.target
        while not (target.has_version(replica) and target.has_mode(replica)):
            self.aborts.send_again(replica)
            await target.pull(replica)
            await target.pause(replica)
        self.admit(replica)  # no await since the check

    def trouble(self) -> str | None:
        """Explain why not enough replicas serve; None if enough do."""
        if self.enough.is_set():
            return None
        count, serving = len(self._replicas), self._num_serving
        if serving:
            are = "generator serves" if serving == 1 else "generators serve"
            return f"{serving} {are}, but at least {self.least} must"
        return f"none of {count} generators is in service" if count else "there are no generators"

    async def close(self) -> None:
        """Remove and close all replicas. Errors are logged, and a call past its limit is abandoned."""
        await asyncio.gather(*(self._close(self.remove(replica.name)) for replica in self))

    async def _close(self, replica: PooledReplica) -> None:
        try:
            async with limited(self.limits.call_s, "the close"):
                await replica.calls.close()
        except Exception as error:
            logger.warning("replica %s did not close: %r", replica.name, error)

    async def _recover(self, replica: PooledReplica) -> None:
        try:
            while not (replica.serving or replica.removed):
                doubled = self.limits.quarantine_s * 2 ** min(max(replica.failures - 1, 0), 30)
                await asyncio.sleep(min(doubled, self.limits.max_quarantine_s))
                try:
                    await self.bring_up(replica)
                except Exception as error:
                    self._note_failure(replica, error)
                    logger.warning("replica %s stays out of service: %r", replica.name, error)
                else:
                    logger.info("replica %s serves again", replica.name)
        finally:
            self._recovering.discard(replica)

    def _note_failure(self, replica: PooledReplica, error: Exception) -> None:
        replica.failures += 1
        replica.last_error = self.last_error = error

    def _update_events(self) -> None:
        num_healthy = sum(replica.healthy for replica in self)
        _set(self.serving, self._num_serving > 0)
        _set(self.enough, self._num_serving > 0 and num_healthy >= self.least)


def _ignore(*_: object) -> None: ...


def _set(event: asyncio.Event, is_set: bool) -> None:
    if is_set:
        event.set()
    else:
        event.clear()


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Snapshot of a replica for metrics.

    Example: `ReplicaStatus("generator_0", True, 3, 1200, 4, None)`
    """

    name: str
    serving: bool
    version: int | None
    load: int  # tokens
    num_requests: int
    last_error: str | None
    gauges: GaugeSummary | None = None  # gauges of its engine between its last two pulls

    @classmethod
    def of(cls, replica: PooledReplica) -> ReplicaStatus:
        error = None if replica.last_error is None or replica.serving else reason(replica.last_error)
        gauges = replica.handle.gauges if isinstance(replica.handle, GaugedReplica) else None
        tokens, requests = replica.in_other_shards
        return cls(
            replica.name,
            replica.serving,
            replica.version,
            replica.load - replica.load_of_others + tokens,
            replica.num_requests + requests,
            error,
            gauges,
        )

    @property
    def mean_waiting(self) -> float:
        """Mean number of requests waiting in the engine; 0 if unknown."""
        if self.gauges is None or not self.gauges.num_steps:
            return 0.0
        return self.gauges.sums.get("waiting_requests", 0.0) / self.gauges.num_steps
