"""Telling replicas to end requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from titan_rl.core.calls.bounded import limited
from titan_rl.generation.router.background_tasks import BackgroundTasks
from titan_rl.generation.router.pool import PooledReplica

logger = logging.getLogger(__name__)


class Aborts:
    """A replica that does not take an abort is not blamed for that: its requests will tell. The log has it once, until
    the replica takes one again."""

    def __init__(self, tasks: BackgroundTasks, call_s: float) -> None:
        self._tasks = tasks
        self._call_s = call_s
        self._orphans: dict[PooledReplica, list[str]] = {}  # of this turn of the event loop
        self._untaken: dict[PooledReplica, list[str]] = {}  # of aborts that failed
        self._unheard = Counter[str]()  # all orphans whose replica may not know of it yet

    async def send(self, replica: PooledReplica, engine_ids: Sequence[str]) -> bool:
        """Ask a replica to end requests, and return whether it has heard that, in time."""
        try:
            async with limited(self._call_s, "the abort"):
                await replica.calls.abort(engine_ids)
        except Exception as error:
            if replica.takes_aborts:
                count = len(engine_ids)
                logger.warning("replica %s did not take an abort of %d requests: %r", replica.name, count, error)
            replica.takes_aborts = False
            return False
        replica.takes_aborts = True
        return True

    def send_soon(self, replica: PooledReplica, engine_id: str) -> None:
        """Nobody waits for this request any more, and its engine may be at it still. All of one turn of the event loop
        are one call: a replica that is lost leaves many at once."""
        if not self._orphans:
            asyncio.get_running_loop().call_soon(self._send_orphans)
        self._orphans.setdefault(replica, []).append(engine_id)
        self._unheard[engine_id] += 1

    def may_run(self, engine_id: str) -> bool:
        """Whether an engine may be at a request of this id that nobody waits for: another one must not have it."""
        return engine_id in self._unheard

    def send_again(self, replica: PooledReplica) -> None:
        """The replica may take now what it did not take before."""
        self._start(replica, ())

    def forget(self, replica: PooledReplica) -> None:
        """It is removed, so that nobody will ask its engine for anything again."""
        self._heard(self._untaken.pop(replica, ()))

    def _send_orphans(self) -> None:
        orphans, self._orphans = self._orphans, {}
        for replica, engine_ids in orphans.items():
            self._start(replica, engine_ids)

    def _start(self, replica: PooledReplica, engine_ids: Sequence[str]) -> None:
        if engine_ids := [*self._untaken.pop(replica, ()), *engine_ids]:
            self._tasks.start(self._end_orphans(replica, engine_ids), f"abort {len(engine_ids)} on {replica.name}")

    async def _end_orphans(self, replica: PooledReplica, engine_ids: Sequence[str]) -> None:
        if await self.send(replica, engine_ids) or replica.removed:
            self._heard(engine_ids)
        else:  # the engine may be at them still
            self._untaken.setdefault(replica, []).extend(engine_ids)

    def _heard(self, engine_ids: Sequence[str]) -> None:
        """No engine is at these any more."""
        for engine_id in engine_ids:
            self._unheard[engine_id] -= 1
            if not self._unheard[engine_id]:
                del self._unheard[engine_id]
