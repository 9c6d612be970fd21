"""Replicas from which nothing comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from titan_rl.errors import EngineStalledError
from titan_rl.routing.member import Member


class StallWatch:
    """Tells of a replica that has requests and gives no sign of life for `limit_s` seconds.

    Signs of life are its tokens, its answers, its pulls, and its word that the engine has stepped, whichever request
    they are about: one that queues behind others waits for as long as those move. Frozen time does not count.

    A sign costs a store, however many there are: each replica with requests has one timer, which looks at when the
    last one came.
    """

    def __init__(self, limit_s: float, on_stall: Callable[[Member, EngineStalledError], None]) -> None:
        if not limit_s > 0:
            raise ValueError(f"stall_timeout_s is {limit_s!r}; it must be above 0")
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._num_waiting: Counter[Member] = Counter()
        self._timers: dict[Member, asyncio.TimerHandle] = {}
        self._frozen_at: float | None = None

    @contextmanager
    def watching(self, member: Member) -> Generator[None]:
        """One more request waits for `member` until the block is left."""
        if not self._num_waiting[member]:
            member.hear()
            self._look(member)
        self._num_waiting[member] += 1
        try:
            yield
        finally:
            self._num_waiting[member] -= 1
            if not self._num_waiting[member]:
                del self._num_waiting[member]
                self._stop(member)

    def freeze(self) -> None:
        """Stop the clocks."""
        if self._frozen_at is None:
            self._frozen_at = asyncio.get_running_loop().time()
            for member in self._num_waiting:
                self._stop(member)

    def thaw(self) -> None:
        """Let the clocks run on, with what was left."""
        if (frozen_at := self._frozen_at) is not None:
            self._frozen_at = None
            now = asyncio.get_running_loop().time()
            for member in self._num_waiting:
                member.heard_at = now - max(0.0, frozen_at - member.heard_at)
                self._look(member)

    def _look(self, member: Member) -> None:
        if self._frozen_at is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= member.heard_at + self._limit_s:
            self._on_stall(member, EngineStalledError(f"nothing has come from {member.name} for {self._limit_s:g} s"))
            member.hear()  # its requests leave it, and are told of no second time
        self._timers[member] = loop.call_at(member.heard_at + self._limit_s, self._look, member)

    def _stop(self, member: Member) -> None:
        if (timer := self._timers.pop(member, None)) is not None:
            timer.cancel()
