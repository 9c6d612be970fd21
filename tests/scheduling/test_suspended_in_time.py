"""No batch waits forever for groups that `tail = "tail_batch"` suspends, under any other settings."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import in_virtual_time

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, Turn, VersionSpan
from titan_rl.scheduling.backlog import Backlog
from titan_rl.scheduling.lease import Lease, Ledger
from titan_rl.scheduling.limits import RolloutCapacity, SlotPool
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.testing.clock import ManualClock


def group_of(index: int, versions: list[int]) -> RolloutGroup:
    """Group of one rollout, with a token of each version."""
    spans = [VersionSpan(version, 1) for version in versions]
    completion = Completion("r", [1] * len(spans), [0.0] * len(spans), FinishReason.STOP, spans)
    rollout = Rollout(f"{index}/0", str(index), 0, None, turns=[Turn([0], completion)])
    return RolloutGroup(str(index), None, [rollout])


class Run:
    """A run in virtual time whose groups take long-tailed numbers of tokens, a second each."""

    def __init__(self, config: SchedulingConfig, seed: int, train_s: float) -> None:
        self.config, self.seed, self.train_s = config, seed, train_s
        self.version = 0

    async def play(self, lease: Lease) -> RolloutGroup:
        versions: list[int] = []
        for _ in range(1 + int(random.Random(f"{self.seed}/{lease.index}").paretovariate(0.8)) % 60):
            await lease.suspension.wait_resumed()
            versions.append(self.version)
            await asyncio.sleep(1)
        return group_of(lease.index, versions)

    async def train(self, steps: int) -> list[int]:
        """Return the age of the oldest token of each trained group."""
        budget, ages = steps * self.config.groups_per_step, list[int]()
        scheduler = GroupScheduler(self.play, self.config, group_size=1, budget=budget, filters=[lambda group: None])
        async with asyncio.timeout(1e6), scheduler:
            async for batch in scheduler.batches():
                ages += [batch.version - min(group.versions) for group in batch.groups]
                await asyncio.sleep(self.train_s)
                self.version += 1
        return ages


def train(config: SchedulingConfig, *, seed: int, train_s: float, steps: int) -> list[int]:
    return in_virtual_time(Run(config, seed, train_s).train(steps))


def with_age(knobs: dict[str, Any]) -> SchedulingConfig:
    """Replace the window by an age bound, `more_age` above the least possible one, if that is set."""
    more = knobs.pop("more_age")
    if more is not None:
        least = SchedulingConfig.model_validate(knobs | {"window": 1}).age_bound
        knobs |= {"window": None, "max_group_age": least + more}
    return SchedulingConfig.model_validate(knobs | {"tail": "tail_batch"})


@settings(max_examples=examples(100), deadline=None)
@given(
    config=st.fixed_dictionaries(
        {
            "groups_per_step": st.integers(1, 5),
            "max_staleness": st.integers(0, 2),
            "oversample": st.sampled_from([2.0, 0.5, 0.0]),
            "window": st.sampled_from([None, 3, 16]),
            "more_age": st.sampled_from([0, 1, 2, 4, None]),
            "max_running_rollouts": st.sampled_from([None, 3]),
        }
    ).map(with_age),
    seed=st.integers(0, 99),
    train_s=st.sampled_from([0.0, 3.0, 20.0]),
)
def test_every_group_is_trained_within_the_age_bound(config: SchedulingConfig, seed: int, train_s: float) -> None:
    ages = train(config, seed=seed, train_s=train_s, steps=40)
    assert len(ages) == 40 * config.groups_per_step
    assert max(ages) <= config.age_bound


def test_suspended_group_is_resumed_before_it_gets_too_old() -> None:
    """The bound is the least possible: enough groups finish soon, and each would make the suspended one too old."""
    config = SchedulingConfig(groups_per_step=4, max_staleness=0, oversample=2.0, tail="tail_batch", max_group_age=3)
    assert max(train(config, seed=0, train_s=1.0, steps=60)) <= 3


@pytest.mark.looptime
async def test_regenerated_group_is_not_suspended() -> None:
    """Group 0, of an earlier run, ends with tokens that are too old after the batch of group 1 suspended it."""
    played: list[int] = []
    suspended = asyncio.Event()

    async def play(lease: Lease) -> RolloutGroup:
        played.append(lease.index)
        if played == [0]:
            await suspended.wait()
            return group_of(0, [0])
        await lease.suspension.wait_resumed()
        return group_of(lease.index, [lease.version])

    config = SchedulingConfig(groups_per_step=1, max_staleness=0, oversample=1.0, tail="tail_batch")
    scheduler = GroupScheduler(
        play,
        config,
        group_size=1,
        budget=2,
        filters=(),
        version=9,
        backlog=Backlog(next_index=1, unsettled=[0]),
    )
    async with asyncio.timeout(1e6), scheduler:
        first = await scheduler.next_batch()
        suspended.set()
        first.release()
        second = await scheduler.next_batch()
    assert [batch.groups[0].group_id for batch in (first, second)] == ["1", "0"]
    assert played == [0, 1, 0]


@pytest.mark.looptime
async def test_siblings_that_end_while_their_group_waits_for_permits_need_none() -> None:
    slots, capacity = SlotPool(1), RolloutCapacity(2)
    await slots.acquire()
    lease = Lease(0, slots, Ledger(ManualClock()))
    lease.mark_running(await capacity.take(2), 0)
    lease.suspend()
    resuming = asyncio.create_task(lease.wait_suspended(capacity))
    await asyncio.sleep(0)
    other = await capacity.take(2)
    lease.let_resume()
    await asyncio.sleep(0)
    lease.rollout_finished(Rollout("0/1", "0", 1, None))
    other.keep(0)
    async with asyncio.timeout(10):
        await resuming
    assert capacity.in_flight == 1
    lease.has_ended()
    assert capacity.in_flight == 0


@pytest.mark.looptime
async def test_regenerated_group_keeps_its_permits_after_a_late_abort() -> None:
    slots, capacity, may_abort = SlotPool(1), RolloutCapacity(1), asyncio.Event()

    async def abort(request_ids: Collection[str]) -> None:
        await may_abort.wait()

    await slots.acquire()
    lease = Lease(0, slots, Ledger(ManualClock()))
    lease.mark_running(await capacity.take(1), 0)
    with lease.suspension.request("r", abort):
        lease.suspend()
        waiting = asyncio.create_task(lease.wait_suspended(capacity))
        await asyncio.sleep(0)
    lease.mark_done(group_of(0, [0]))
    lease.has_ended()
    lease.begin_again()
    lease.mark_running(await capacity.take(1), 0)
    stolen = asyncio.create_task(capacity.take(1))  # waits until the group has ended
    await asyncio.sleep(0)
    may_abort.set()
    async with asyncio.timeout(10):
        await waiting
    await asyncio.sleep(0)
    assert (capacity.in_flight, stolen.done()) == (1, False)
    lease.has_ended()
    await stolen
