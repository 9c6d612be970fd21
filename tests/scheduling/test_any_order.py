"""GroupScheduler under any order of events, several of them in one turn of the event loop.

Siblings of a group finish one at a time. A cancelled group takes any time to clean up, and then obeys, fails, or
returns as if nothing had happened. In any order, slots and permits are returned once and no limit is exceeded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from depth import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, Turn, VersionSpan
from titan_rl.scheduling.batches import GroupBatch
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig

EVENTS = ["finish_newest", "finish_sibling", "ask", "release", "clean_up"]


class Played:
    """Group that is being played."""

    def __init__(self, lease: Lease, version: int, group_size: int) -> None:
        self.lease = lease
        self.version = version
        self.left = group_size  # siblings
        self.over = asyncio.Event()
        self.cleaned = asyncio.Event()
        self.is_cancelled = False

    def finish_sibling(self) -> None:
        if self.left and not self.is_cancelled:
            self.left -= 1
            self.lease.rollout_finished(rollout_of(self.lease.index, self.left, self.version))
            if not self.left:
                self.over.set()


def rollout_of(index: int, sibling: int, version: int) -> Rollout:
    completion = Completion("r", [1], [0.0], FinishReason.STOP, [VersionSpan(version, 1)])
    return Rollout(f"{index}/{sibling}", str(index), sibling, None, turns=[Turn([0], completion)])


class SchedulerMachine(RuleBasedStateMachine):
    """Events that can happen to a scheduler, in any order."""

    tail: Literal["carry_over", "tail_batch", "drop"] = "carry_over"

    @initialize(
        knobs=st.fixed_dictionaries(
            {
                "groups_per_step": st.integers(1, 2),
                "max_staleness": st.sampled_from([2, 1, 0]),
                "oversample": st.sampled_from([2.0, 1.0, 0.0]),
                "window": st.sampled_from([5, None, 1]),
                "drop_age": st.sampled_from(["drop", 2]),
                "max_running_rollouts": st.sampled_from([3, 4, None]),
            }
        ),
        group_size=st.integers(1, 2),
        budget=st.integers(1, 16),
        dropped=st.sets(st.integers(0, 6), max_size=2),
        ends=st.lists(st.sampled_from(["obeys", "fails", "returns"]), min_size=1, max_size=5),
    )
    def start(self, knobs: dict[str, Any], group_size: int, budget: int, dropped: set[int], ends: list[str]) -> None:
        self.loop = asyncio.new_event_loop()
        drop_age = knobs.pop("drop_age")
        tail = drop_age if self.tail == "drop" else self.tail
        self.config = SchedulingConfig(max_refills=100, tail=tail, **knobs)
        self.group_size, self.budget, self.ends = group_size, budget, ends
        self.version = 0
        self.playing: dict[int, Played] = {}
        self.batches: list[GroupBatch] = []
        self.trained: list[int] = []
        self.lost: list[int] = []
        self.finished_indices: list[int] = []
        self.asked: asyncio.Task[GroupBatch] | None = None

        async def make() -> GroupScheduler:
            return GroupScheduler(
                self.run_group,
                self.config,
                group_size=group_size,
                budget=budget,
                filters=[lambda group: "picked" if int(group.group_id) in dropped else None],
                observer=self,
            )

        self.scheduler = self.loop.run_until_complete(make())
        self.running = self.loop.create_task(self.scheduler.run())

    async def run_group(self, lease: Lease) -> RolloutGroup:
        played = self.playing[lease.index] = Played(lease, self.version, self.group_size)
        try:
            await played.over.wait()
        except asyncio.CancelledError:
            played.is_cancelled = True
            await played.cleaned.wait()
            match self.ends[lease.index % len(self.ends)]:
                case "obeys":
                    raise
                case "fails":
                    raise ValueError("it broke while it was cleaning up") from None
                case _:
                    pass
        finally:
            del self.playing[lease.index]
        rollouts = [rollout_of(lease.index, sibling, played.version) for sibling in range(self.group_size)]
        return RolloutGroup(str(lease.index), None, rollouts)

    # The scheduler's observer

    def finished(self, index: int, group: RolloutGroup) -> None:
        assert index not in self.lost
        self.finished_indices.append(index)

    def dropped(self, step: int, index: int, reason: str, group: RolloutGroup | None) -> None:
        assert index not in self.lost
        self.lost.append(index)

    def discarded(self, index: int, group: RolloutGroup) -> None: ...

    def batch(self, version: int, indices: list[int]) -> None:
        assert not set(indices) & set(self.lost)

    # Events

    def finish_sibling(self, draw: Callable[[int], int]) -> None:
        if self.playing:
            list(self.playing.values())[draw(len(self.playing))].finish_sibling()

    def finish_newest(self, draw: Callable[[int], int]) -> None:
        if self.playing:
            newest = list(self.playing.values())[-1]
            while newest.left and not newest.is_cancelled:
                newest.finish_sibling()

    def clean_up(self, draw: Callable[[int], int]) -> None:
        if cancelled := [played for played in self.playing.values() if played.is_cancelled]:
            cancelled[draw(len(cancelled))].cleaned.set()

    def ask(self, draw: Callable[[int], int]) -> None:
        if self.asked is None and len(self.trained) < self.budget:
            self.asked = self.loop.create_task(self.scheduler.next_batch())

    def release(self, draw: Callable[[int], int]) -> None:
        if self.batches:
            self.version += 1
            self.batches.pop(0).release()

    @rule(
        events=st.lists(
            st.tuples(st.sampled_from(EVENTS), st.integers(0, 10**6)),
            min_size=1,
            max_size=6,
        ),
        turns=st.integers(0, 8),
    )
    def happen_in_one_turn(self, events: list[tuple[str, int]], turns: int) -> None:
        async def turn() -> None:
            for name, number in events:
                getattr(self, name)(lambda size, number=number: number % size)
            for _ in range(turns):
                await asyncio.sleep(0)

        self.do(turn())

    def do(self, work: Awaitable[None]) -> None:
        self.loop.run_until_complete(work)
        if self.asked is not None and self.asked.done():
            batch, self.asked = self.asked.result(), None
            self.trained += [int(group.group_id) for group in batch.groups]
            self.batches.append(batch)

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert not self.running.done() or len(self.trained) == self.budget
        assert 0 <= self.scheduler.slots_held <= self.config.num_slots
        in_flight = sum(
            played.left
            for played in self.playing.values()
            if not played.lease.suspension.is_suspended or played.is_cancelled
        )
        assert in_flight <= self.scheduler.rollouts_in_flight
        if limit := self.config.max_running_rollouts:
            assert self.scheduler.rollouts_in_flight <= max(limit, self.group_size)
        assert len(self.trained) == len(set(self.trained))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(600):
            if self.running.done() and not self.batches:
                break
            for name in ("ask", "clean_up", "release"):
                self.happen(name)
            for played in list(self.playing.values()):
                played.finish_sibling()
        assert self.running.done(), "every group of the budget is handed out"
        self.running.result()
        self.happen("ask")
        assert len(self.trained) == len(set(self.trained)) == self.budget
        assert sorted([*self.trained, *self.lost]) == list(range(self.scheduler.next_index))
        assert set(self.trained) <= set(self.finished_indices)
        assert self.scheduler.slots_held == 0
        assert self.scheduler.rollouts_in_flight == 0
        assert asyncio.all_tasks(self.loop) == set()
        self.loop.close()

    def happen(self, name: str) -> None:
        async def turn() -> None:
            getattr(self, name)(lambda size: 0)
            for _ in range(6):
                await asyncio.sleep(0)

        self.do(turn())


class DroppingMachine(SchedulerMachine):
    tail = "drop"


class SuspendingMachine(SchedulerMachine):
    tail = "tail_batch"


LIMITS = settings(max_examples=examples(100), stateful_step_count=25, deadline=None)
TestCarryingOver = SchedulerMachine.TestCase
TestDropping = DroppingMachine.TestCase
TestSuspending = SuspendingMachine.TestCase
TestCarryingOver.settings = TestDropping.settings = TestSuspending.settings = LIMITS
