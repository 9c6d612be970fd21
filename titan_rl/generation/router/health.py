"""Health of replicas: quarantine after a failure, the stall watchdog, and the background tasks of both."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator
from contextlib import contextmanager
from typing import Any

from titan_rl.core.calls.cancellation import asked_to_cancel
from titan_rl.core.errors import EngineStalledError, StrayCancellationError
from titan_rl.generation.router.pool import Pool, PooledReplica
from titan_rl.generation.router.replica import Limits, Replica

logger = logging.getLogger(__name__)


async def cancel_and_drain(tasks: Collection[asyncio.Task[Any]], timeout_s: float) -> list[asyncio.Task[Any]]:
    """Cancel tasks and wait until they have ended, whatever they end with.

    Returns:
        Tasks still running after `timeout_s`; they are named in the log.
    """
    if not tasks:
        return []
    for task in tasks:
        task.cancel()
    _, left = await asyncio.wait(tasks, timeout=timeout_s)
    if left:
        logger.warning("gave up on %d tasks after %g s: %s", len(left), timeout_s, [task.get_name() for task in left])
    return list(left)


class BackgroundTasks:
    """Tasks that run until they are done or the set is closed. An exception in one goes to `on_error`."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run `coroutine`; after `close` it is dropped unstarted."""
        if self._closed:
            coroutine.close()
            return
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self, timeout_s: float) -> None:
        self._closed = True
        await cancel_and_drain(tuple(self._tasks), timeout_s)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if not asked_to_cancel(task):
                message = f"{task.get_name()!r} was cancelled, though nobody had asked for that"
                self._on_error(StrayCancellationError(message))
        elif (error := task.exception()) is not None:
            self._on_error(error)


OnReplicaFailed = Callable[[Replica, Exception], None]


class Health:
    """Quarantines a replica at its first infrastructure failure and brings it up again in the background.

    A replica that fails again before it has answered a request waits twice as long, so that one which fails fast
    draws a request now and then and no more.

    Args:
        prepare: brings a replica to the current version and pause state; raises when it cannot.
        prepared: whether it is there now.
        on_failed: told of each quarantine, so that a supervisor can replace the replica.
    """

    def __init__(
        self,
        pool: Pool,
        tasks: BackgroundTasks,
        limits: Limits,
        *,
        prepare: Callable[[PooledReplica], Awaitable[None]],
        prepared: Callable[[PooledReplica], bool],
        on_failed: OnReplicaFailed | None,
    ) -> None:
        self._pool = pool
        self._tasks = tasks
        self._limits = limits
        self._prepare = prepare
        self._prepared = prepared
        self._on_failed = on_failed
        self._recovering: set[PooledReplica] = set()

    def quarantine(self, replica: PooledReplica, error: Exception, epoch: int | None = None) -> None:
        """Out of service because of `error`.

        Args:
            epoch: the replica's epoch when the failed call began; a failure from before its last admission is ignored.
        """
        is_out = replica in self._recovering and not replica.serving
        if replica.removed or is_out or (epoch is not None and epoch != replica.epoch):
            return
        replica.failures += 1
        replica.last_error = self._pool.last_error = error
        logger.warning("replica %s is out of service: %r", replica.name, error)
        self.take_out(replica)
        if self._on_failed is not None:
            try:
                self._on_failed(replica.handle, error)
            except Exception:
                logger.exception("on_replica_failed raised for replica %s", replica.name)

    def take_out(self, replica: PooledReplica) -> None:
        """Out of service until it has pulled the current version, without blame."""
        self._pool.withdraw(replica)
        replica.version = None
        if replica not in self._recovering and not replica.removed:
            self._recovering.add(replica)
            self._tasks.start(self._recover(replica), f"recover {replica.name}")

    async def bring_up(self, replica: PooledReplica) -> None:
        """Into service, with the current weights and pause state.

        Raises:
            Exception: whatever the replica fails with.
        """
        while not self._prepared(replica):
            await self._prepare(replica)
        self._pool.admit(replica)  # no await since the check

    async def _recover(self, replica: PooledReplica) -> None:
        try:
            while not (replica.serving or replica.removed):
                doubled = self._limits.quarantine_s * 2 ** min(max(replica.failures - 1, 0), 30)
                await asyncio.sleep(min(doubled, self._limits.max_quarantine_s))
                try:
                    await self.bring_up(replica)
                except Exception as error:
                    replica.failures += 1
                    replica.last_error = self._pool.last_error = error
                    logger.warning("replica %s stays out of service: %r", replica.name, error)
                else:
                    logger.info("replica %s serves again", replica.name)
        finally:
            self._recovering.discard(replica)


_ROUNDING_S = 1e-6  # by which timers may come early


class StallWatch:
    """Watchdog for replicas that have requests and give no sign of life for `limit_s` seconds.

    Signs of life are its tokens, its answers, its pulls, and its word that the engine has stepped, whichever request
    they are about: one that queues behind others waits for as long as those move. Frozen time does not count.

    A sign costs a store, however many there are: each replica with requests has one timer, which looks at when the
    last one came. It looks again before it tells, because where something blocks the event loop, what came meanwhile
    is read after a timer that is due.
    """

    def __init__(self, limit_s: float, on_stall: Callable[[PooledReplica, EngineStalledError], None]) -> None:
        if not limit_s > 0:
            raise ValueError(f"stall_timeout_s is {limit_s!r}; it must be above 0")
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._grace_s = min(1.0, limit_s / 4)  # between two looks; one that comes so late says nothing
        self._num_waiting: Counter[PooledReplica] = Counter()
        self._timers: dict[PooledReplica, asyncio.TimerHandle] = {}
        self._frozen_at: float | None = None

    @contextmanager
    def watching(self, replica: PooledReplica) -> Generator[None]:
        """One more request waits for `replica` until the block is left."""
        if not self._num_waiting[replica]:
            replica.hear()
            self._watch(replica)
        self._num_waiting[replica] += 1
        try:
            yield
        finally:
            self._num_waiting[replica] -= 1
            if not self._num_waiting[replica]:
                del self._num_waiting[replica]
                self._stop(replica)

    def freeze(self) -> None:
        """Stop the clocks."""
        if self._frozen_at is None:
            self._frozen_at = asyncio.get_running_loop().time()
            for replica in self._num_waiting:
                self._stop(replica)

    def thaw(self) -> None:
        """Let the clocks run on, with what was left."""
        if (frozen_at := self._frozen_at) is not None:
            self._frozen_at = None
            now = asyncio.get_running_loop().time()
            for replica in self._num_waiting:
                replica.heard_at = now - max(0.0, frozen_at - replica.heard_at)
                self._watch(replica)

    def _watch(self, replica: PooledReplica) -> None:
        """Look when a sign is almost overdue, or when it is if that is sooner."""
        if self._frozen_at is None:
            deadline = replica.heard_at + self._limit_s
            first = deadline - self._grace_s
            is_close = first < asyncio.get_running_loop().time()
            self._look_at(replica, deadline if is_close else first, again=is_close)

    def _look_at(self, replica: PooledReplica, when: float, *, again: bool) -> None:
        self._timers[replica] = asyncio.get_running_loop().call_at(when, self._look, replica, when, again)

    def _look(self, replica: PooledReplica, due: float, again: bool) -> None:
        now = asyncio.get_running_loop().time()
        deadline = replica.heard_at + self._limit_s
        if now < deadline - self._grace_s - _ROUNDING_S:
            self._watch(replica)
        elif not again or now < deadline - _ROUNDING_S or now > due + self._grace_s:
            self._look_at(replica, max(deadline, now + self._grace_s), again=True)
        else:
            self._on_stall(replica, EngineStalledError(f"nothing has come from {replica.name} for {self._limit_s:g} s"))
            replica.hear()  # its requests leave it, and are told of no second time
            self._watch(replica)

    def _stop(self, replica: PooledReplica) -> None:
        if (timer := self._timers.pop(replica, None)) is not None:
            timer.cancel()
