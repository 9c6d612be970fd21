"""The router's own record of one replica: its load, and whether it may be chosen."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from titan_rl.calls.user_code import reason
from titan_rl.generation.router.guarded import GuardedReplica
from titan_rl.generation.router.replica import Replica
from titan_rl.generation.types import PauseMode


class PooledReplica:
    """One replica as the router sees it. Only the router and its parts change it.

    `load` is an estimate in tokens: prompt and token budget of every request sent and not yet answered.
    """

    def __init__(self, handle: Replica, cancel_s: float) -> None:
        self.handle = handle
        self.calls = GuardedReplica(handle, cancel_s)
        self.name = handle.name
        self.load = 0  # tokens
        self.num_requests = 0
        self.idle = asyncio.Event()  # set while num_requests is 0
        self.idle.set()
        self.serving = False  # the strategy may choose it
        self.draining = False  # out of service for a pull, healthy
        self.removed = False  # for good
        self.version: int | None = None  # pulled through this router; None where that is not known
        self.paused: PauseMode | Literal["unknown"] | None = None  # "unknown" after a call that failed
        self.epoch = 0  # admissions so far: tells a late failure from a new one
        self.failures = 0  # in a row, without an answered request between them
        self.last_error: Exception | None = None
        self.num_served = 0  # answers and messages of tokens so far
        self.heard_at = 0.0  # when the last sign of life came, by the event loop's clock
        self.takes_aborts = True  # so far as the last one told
        self.pulling = asyncio.Lock()
        self.pausing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"PooledReplica({self.name!r}, load={self.load}, serving={self.serving}, version={self.version})"

    def hear(self, *, served: bool = False) -> None:
        """A sign of life has come, or more than that: tokens or an answer."""
        self.num_served += served
        self.heard_at = asyncio.get_running_loop().time()

    def reserve(self, cost: int) -> None:
        """Charge a request. `Reservation` is the only caller, so that each is released once."""
        if not self.num_requests:
            self.idle.clear()
        self.num_requests += 1
        self.load += cost

    def release(self, cost: int) -> None:
        self.num_requests -= 1
        self.load -= cost
        assert self.load >= 0
        assert self.num_requests >= 0
        if not self.num_requests:
            self.idle.set()


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A snapshot for metrics: `ReplicaStatus("generator_0", True, 3, 1200, 4, None)`."""

    name: str
    serving: bool
    version: int | None
    load: int  # tokens
    num_requests: int
    last_error: str | None

    @classmethod
    def of(cls, replica: PooledReplica) -> ReplicaStatus:
        error = None if replica.last_error is None or replica.serving else reason(replica.last_error)
        return cls(replica.name, replica.serving, replica.version, replica.load, replica.num_requests, error)
