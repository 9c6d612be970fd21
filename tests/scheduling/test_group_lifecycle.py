"""Lifecycle of a group: every sequence of a lease's calls follows the transition table or fails."""

import itertools
from collections.abc import Callable

import pytest

from titan_rl import Lease, RolloutGroup
from titan_rl.scheduling.lease import TRANSITIONS, GroupState, Ledger
from titan_rl.scheduling.limits import RolloutPermits, SlotPool
from titan_rl.testing.clock import ManualClock

CALLS: dict[GroupState | None, Callable[[Lease], object]] = {
    GroupState.PENDING: Lease.begin_again,
    GroupState.RUNNING: lambda lease: lease.mark_running(RolloutPermits(), 0),
    GroupState.SUSPENDED: Lease.suspend,
    GroupState.DONE: lambda lease: lease.mark_done(RolloutGroup("0", None, [])),
    GroupState.TRAINING: Lease.mark_training,
    None: Lease.settle,
}


async def test_lease_allows_only_listed_transitions() -> None:
    for wanted in itertools.product(CALLS, repeat=4):
        await follow(wanted)


async def follow(wanted: tuple[GroupState | None, ...]) -> None:
    ledger, pool = Ledger(ManualClock()), SlotPool(1)
    await pool.acquire()
    lease = Lease(0, pool, ledger)
    for state in wanted:
        before = lease.state
        if before is None or state not in TRANSITIONS[before]:
            with pytest.raises(AssertionError):
                CALLS[state](lease)
            return
        CALLS[state](lease)
        assert lease.state is state
        assert ledger.states == ({} if state is None else {state: 1})
        assert pool.free == (state is None)
