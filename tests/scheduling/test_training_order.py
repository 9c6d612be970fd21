"""Several tasks under a real scheduler, in virtual time: the trained mix, the age bound, and the end of a run."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from background import HANG_S
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import MORE_AGE, aged, group_of, settle
from virtual_time import in_virtual_time

from titan_rl import RolloutGroup
from titan_rl.core.errors import TrainingError
from titan_rl.scheduling.backlog import Backlog
from titan_rl.scheduling.curriculum import InOrder
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.scheduling.task_mix import MixEvent, TaskMix, WeightedTask


@dataclass
class Kind:
    """Properties of a task that matter to a scheduler."""

    weight: float = 1.0
    seconds: float = 1.0  # mean duration of a group; a step takes one second
    dropped: float = 0.0
    stuck_s: float = 0.0  # additional duration of its first group


@dataclass
class Played:
    tasks: list[str] = field(default_factory=list[str])  # of the trained groups
    seconds: float = 0.0


class Play:
    """Observer of a scheduler whose groups take random times and are dropped at random."""

    def __init__(self, kinds: dict[str, Kind], config: SchedulingConfig, steps: int, seed: int) -> None:
        self.kinds, self.config, self.steps, self.random = kinds, config, steps, random.Random(seed)
        self.mix = TaskMix({name: WeightedTask(kind.weight, InOrder()) for name, kind in kinds.items()})
        self.version = 0
        self.drops: set[int] = set()

    def finished(self, index: int, group: RolloutGroup) -> None:
        self.mix.finished(index, [])

    def dropped(self, step: int, index: int, reason: str, group: RolloutGroup | None) -> None:
        self.mix.dropped(index)

    def discarded(self, index: int, group: RolloutGroup) -> None: ...

    def batch(self, version: int, indices: Sequence[int]) -> None: ...

    async def run_group(self, lease: Lease) -> RolloutGroup:
        first = self.version
        played = self.mix.assignment(lease.index)
        kind = self.kinds[played.task]
        stuck_s = kind.stuck_s if played.sample == 0 else 0.0
        will_drop = self.random.random() < kind.dropped
        await asyncio.sleep(kind.seconds * self.random.choice([0.2, 1.0, 1.0, 4.0]) + stuck_s)
        await lease.suspension.wait_resumed()
        if will_drop:
            self.drops.add(lease.index)
        return group_of(lease.index, first, self.version)

    async def run(self) -> Played:
        played = Played()
        size = self.config.groups_per_step
        scheduler = GroupScheduler(
            self.run_group,
            self.config,
            group_size=1,
            budget=self.steps * size,
            filters=[lambda group: "picked" if int(group.group_id) in self.drops else None],
            observer=self,
            order=self.mix,
        )
        began = asyncio.get_running_loop().time()
        async with scheduler:
            async for batch in scheduler.batches():
                indices = [int(group.group_id) for group in batch.groups]
                played.tasks += [self.mix.assignment(index).task for index in indices]
                await asyncio.sleep(1.0)
                self.mix.trained(indices)
                self.version = batch.step
        played.seconds = asyncio.get_running_loop().time() - began
        return played


def play(kinds: dict[str, Kind], steps: int, seed: int = 0, **knobs: Any) -> Played:
    config = SchedulingConfig(**{"max_refills": 10_000, **knobs})
    return in_virtual_time(Play(kinds, config, steps, seed).run())


def most_off(tasks: Sequence[str], kinds: dict[str, Kind], size: int) -> float:
    """Return the largest deviation of a task from its share after any number of batches, in groups."""
    total = sum(kind.weight for kind in kinds.values())
    ends = range(size, len(tasks) + 1, size)
    return max(abs(tasks[:end].count(n) - end * k.weight / total) for end in ends for n, k in kinds.items())


@given(
    kinds=st.dictionaries(
        st.sampled_from("abc"),
        st.builds(Kind, st.floats(0.1, 10), st.sampled_from([0.1, 1.0, 10.0]), st.sampled_from([0.0, 0.0, 0.5, 0.9])),
        min_size=2,
    ),
    knobs=st.fixed_dictionaries(
        {
            "groups_per_step": st.integers(1, 8),
            "max_staleness": st.integers(0, 3),
            "oversample": st.sampled_from([0.0, 0.5, 2.0]),
            "window": st.sampled_from([None, 1, 3, 16]),
            "tail": st.sampled_from(["carry_over", "tail_batch", "drop"]),
            "max_running_rollouts": st.sampled_from([None, 2, 5]),
            "more_age": MORE_AGE,
        }
    ).map(aged),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=examples(100))
def test_every_batch_follows_the_turns_within_the_age_bound(kinds, knobs, seed):
    """The scheduler checks the age, and its run would end."""
    played = play(kinds, 30, seed, **knobs)
    assert most_off(played.tasks, kinds, knobs["groups_per_step"]) < 1 + 1e-9


@pytest.mark.parametrize(
    ("kinds", "knobs"),
    [
        ({"a": Kind(), "b": Kind(dropped=0.5)}, {"groups_per_step": 128}),
        ({"a": Kind(), "b": Kind(dropped=0.9)}, {}),
        ({"a": Kind(), "b": Kind(seconds=10)}, {"tail": "drop", "oversample": 1.0}),
    ],
)
def test_drops_and_slow_tasks_do_not_change_the_mix(kinds, knobs):
    size = knobs.get("groups_per_step", 16)
    assert most_off(play(kinds, 1024 // size, **knobs).tasks, kinds, size) < 1 + 1e-9


def test_group_of_a_rare_task_is_overtaken_less_often():
    """The rare task has one turn in ten: overtaking its stuck group twice would cost ten steps, beyond the bound."""
    kinds = {"often": Kind(9.0, 0.1), "rarely": Kind(1.0, 0.1, stuck_s=30.0)}
    knobs = {"groups_per_step": 2, "max_staleness": 10, "window": 3}
    assert most_off(play(kinds, 50, **knobs).tasks, kinds, 2) < 1 + 1e-9


async def test_shortened_run_ends_with_the_groups_it_has():
    """The first turn is that of a dropped group, and the remaining budget has no room for its replacement."""
    tasks = {"a": WeightedTask(1.0, InOrder()), "b": WeightedTask(2.0, InOrder())}
    earlier = TaskMix(tasks)
    assert [earlier.assignment(index).task for index in range(3)] == ["b", "a", "b"]
    earlier.dropped(0)
    earlier.dropped(2)
    assert earlier.assignment(3).task == "b"
    mix = TaskMix(tasks, state=json.loads(json.dumps(earlier.state())))

    async def run_group(lease: Lease) -> RolloutGroup:
        return group_of(lease.index, 0)

    backlog, settings = Backlog(next_index=4, unsettled=[1]), SchedulingConfig(groups_per_step=1, max_staleness=2)
    scheduler = GroupScheduler(
        run_group, settings, group_size=1, budget=1, filters=[lambda group: None], backlog=backlog, order=mix
    )
    async with scheduler:
        batch = await asyncio.wait_for(scheduler.next_batch(), HANG_S)
        assert [group.group_id for group in batch.groups] == ["1"]
        mix.trained([1])
        assert mix.turns(9) == ["b", "b"]
        batch.release()


class Events(list[MixEvent]):
    def note(self, event: MixEvent) -> None:
        self.append(event)


async def test_restored_groups_are_admitted_in_the_order_of_their_turns():
    """The first turn of "a" passed from group 0, which was dropped, to group 2; that of group 3 passed to group 5."""
    tasks = {"a": WeightedTask(1.0, InOrder()), "b": WeightedTask(1.0, InOrder())}
    events = Events()
    earlier = TaskMix(tasks, events)
    for index in (0, 1):
        earlier.assignment(index)
    earlier.dropped(0)
    for index in (2, 3, 4):
        earlier.assignment(index)
    earlier.dropped(3)
    earlier.assignment(5)
    assert [earlier.task_of(index) for index in (2, 1, 5, 4)] == ["a", "b", "a", "b"]

    mix, started = TaskMix(tasks, events=events), dict[int, int]()

    async def run_group(lease: Lease) -> RolloutGroup:
        started[lease.index] = lease.version
        return group_of(lease.index, lease.version)

    backlog = Backlog(
        next_index=6,
        unsettled=[1, 2, 4, 5],
        finished={2: group_of(2, 0), 1: group_of(1, 0), 5: group_of(5, 1)},
        batches=[[2], [1], [5]],
    )
    config = SchedulingConfig(groups_per_step=1, max_staleness=1)
    async with GroupScheduler(
        run_group, config, group_size=1, budget=5, filters=[lambda group: None], backlog=backlog, order=mix
    ) as scheduler:
        trained: list[int] = []
        for _ in range(5):
            batch = await asyncio.wait_for(scheduler.next_batch(), HANG_S)
            trained += [int(group.group_id) for group in batch.groups]
            mix.trained(trained[-1:])
            batch.release()
            await settle()
    assert trained == [2, 1, 5, 4, 6]
    assert started[4] == 2, "in its turn, and not as soon as a slot was free"


def test_task_whose_groups_are_all_dropped_ends_the_run():
    kinds = {"easy": Kind(), "hopeless": Kind(dropped=1.0)}
    with pytest.raises(TrainingError, match=r"65 groups .* of the tasks hopeless \(65\): picked \(65\); raise"):
        play(kinds, 10, max_refills=4)
