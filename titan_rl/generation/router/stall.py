"""Replicas from which nothing comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from titan_rl.core.errors import EngineStalledError
from titan_rl.generation.router.pool import PooledReplica

_ROUNDING_S = 1e-6  # by which timers may come early


class StallWatch:
    """Tells of a replica that has requests and gives no sign of life for `limit_s` seconds.

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
