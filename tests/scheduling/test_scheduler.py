"""GroupScheduler: the age bound, slots, handling of the tail, and the end of a run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from background import HANG_S
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, Turn, VersionSpan
from titan_rl.core.calls.user_code import Failure
from titan_rl.core.errors import ConfigError, StrayCancellationError, TrainingError
from titan_rl.scheduling.backlog import Backlog
from titan_rl.scheduling.batches import GroupBatch
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig


def group_of(index: int, *versions: int) -> RolloutGroup:
    spans = [VersionSpan(version, 1) for version in versions]
    completion = Completion("r", [1] * len(spans), [0.0] * len(spans), FinishReason.STOP, spans)
    rollout = Rollout(f"{index}/0", str(index), 0, None, turns=[Turn([0], completion)])
    return RolloutGroup(str(index), None, [rollout])


def never(group: RolloutGroup) -> None:
    return None


class Journal:
    """Observer that records its calls."""

    def __init__(self) -> None:
        self.done: dict[int, RolloutGroup] = {}
        self.lost: list[int] = []
        self.batches: list[list[int]] = []

    def finished(self, index: int, group: RolloutGroup) -> None:
        self.done[index] = group

    def dropped(self, step: int, index: int, reason: str, group: RolloutGroup | None) -> None:
        self.lost.append(index)

    def discarded(self, index: int, group: RolloutGroup) -> None: ...

    def batch(self, version: int, indices) -> None:
        assert version == len(self.batches)
        self.batches.append(list(indices))


class Stage:
    """Groups that start when admitted and finish when `end` is called."""

    def __init__(self) -> None:
        self.version = 0
        self.started: list[int] = []
        self.leases: dict[int, Lease] = {}
        self.finish: dict[int, asyncio.Event] = {}
        self.cancelled: list[int] = []

    async def run_group(self, lease: Lease) -> RolloutGroup:
        first = self.version
        self.started.append(lease.index)
        self.leases[lease.index] = lease
        try:
            await self.finish.setdefault(lease.index, asyncio.Event()).wait()
            await lease.suspension.wait_resumed()
        except asyncio.CancelledError:
            self.cancelled.append(lease.index)
            raise
        return group_of(lease.index, first, self.version)

    def end(self, *indices: int) -> None:
        for index in indices:
            self.finish.setdefault(index, asyncio.Event()).set()


def scheduler_of(
    run_group: Callable[[Lease], Awaitable[RolloutGroup]], *, budget: int = 100, **knobs
) -> GroupScheduler:
    arguments = {"group_size": 1, "filters": [never]}
    for name in ("group_size", "filters", "backlog", "observer", "version"):
        if name in knobs:
            arguments[name] = knobs.pop(name)
    return GroupScheduler(run_group, SchedulingConfig(**knobs), budget=budget, **arguments)  # pyright: ignore


@contextlib.asynccontextmanager
async def running(scheduler: GroupScheduler) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.get_running_loop().create_task(scheduler.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def next_of(scheduler: GroupScheduler) -> GroupBatch:
    return await asyncio.wait_for(scheduler.next_batch(), HANG_S)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def indices(batch) -> list[int]:
    return [int(group.group_id) for group in batch.groups]


def aged(knobs: dict[str, Any]) -> dict[str, Any]:
    """Replace the window by an age bound, `more_age` above the least possible one, if that is set."""
    more = knobs.pop("more_age")
    if more is None:
        return knobs
    config = SchedulingConfig(**knobs | {"window": 1})
    return knobs | {"window": None, "max_group_age": config.age_bound + more}


MORE_AGE = st.sampled_from([None, 0, 1, 3])
KNOBS = st.fixed_dictionaries(
    {
        "more_age": MORE_AGE,
        "groups_per_step": st.integers(1, 3),
        "max_staleness": st.integers(0, 3),
        "oversample": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "window": st.sampled_from([None, 1, 2, 5]),
        "tail": st.sampled_from(["carry_over", "tail_batch", "drop", 2, 3]),
        "max_running_rollouts": st.sampled_from([None, 2, 5]),
    }
).map(aged)


@settings(max_examples=examples(150), deadline=None)
@given(
    knobs=KNOBS,
    steps=st.integers(1, 6),
    group_size=st.integers(1, 3),
    dropped=st.sets(st.integers(0, 12), max_size=3),
    yields=st.lists(st.integers(0, 30), min_size=1, max_size=20),
)
def test_age_bound_slots_and_capacity_hold_for_any_interleaving(knobs, steps, group_size, dropped, yields):
    async def scenario() -> None:
        version = 0
        in_flight = 0
        journal = Journal()
        config = SchedulingConfig(**knobs)

        async def run_group(lease: Lease) -> RolloutGroup:
            nonlocal in_flight
            seen = []
            for sibling in range(group_size):
                for _ in range(1 + yields[(lease.index + sibling) % len(yields)]):
                    await lease.suspension.wait_resumed()
                    seen.append(version)
                    await asyncio.sleep(0)
                lease.rollout_finished(Rollout(f"{lease.index}/{sibling}", str(lease.index), sibling, None))
            return group_of(lease.index, *seen)

        scheduler = scheduler_of(
            run_group,
            budget=steps * config.groups_per_step,
            group_size=group_size,
            filters=[lambda group: "picked" if int(group.group_id) in dropped else None],
            observer=journal,
            max_refills=100,
            **knobs,
        )
        trained: list[int] = []
        async with running(scheduler):
            for step in range(steps):
                batch = await next_of(scheduler)
                assert batch.version == step
                assert all(step - v <= config.age_bound for group in batch.groups for v in group.versions)
                assert scheduler.slots_held <= config.num_slots
                if limit := knobs["max_running_rollouts"]:
                    assert scheduler.rollouts_in_flight <= max(limit, group_size)
                trained += indices(batch)
                for _ in range(yields[step % len(yields)]):
                    await asyncio.sleep(0)
                version = step + 1
                batch.release()
            await settle()
            assert scheduler.slots_held == 0
            assert scheduler.rollouts_in_flight == 0
        assert len(trained) == len(set(trained)) == steps * config.groups_per_step
        assert sorted([*trained, *journal.lost]) == list(range(scheduler.next_index))
        assert [index for batch in journal.batches for index in batch] == trained
        if config.overtaking_window == 1 and config.max_group_age is None and config.drop_age is None:
            assert trained == sorted(trained)
        if config.drop_age is None:
            assert set(journal.lost) <= dropped

    asyncio.run(scenario())


async def test_staleness_zero_admits_nothing_until_the_pull_is_done():
    stage = Stage()
    stage.end(*range(10))
    scheduler = scheduler_of(stage.run_group, groups_per_step=2, max_staleness=0)
    async with running(scheduler):
        batch = await next_of(scheduler)
        await settle()
        assert stage.started == [0, 1]
        stage.version = 1
        batch.release()
        await next_of(scheduler)
        assert stage.started == [0, 1, 2, 3]


async def test_first_finished_groups_are_trained_and_others_carried_over():
    stage = Stage()
    scheduler = scheduler_of(stage.run_group, groups_per_step=2, max_staleness=0, oversample=1.0)
    async with running(scheduler):
        await settle()
        assert stage.started == [0, 1, 2, 3]  # target + ceil(1.0 x 2)
        stage.end(1, 3)
        batch = await next_of(scheduler)
        assert indices(batch) == [1, 3]
        batch.release()
        await settle()
        assert stage.started == [0, 1, 2, 3, 4, 5]
        stage.end(0, 2)
        assert indices(await next_of(scheduler)) == [0, 2]
        assert stage.cancelled == []


async def test_group_is_overtaken_by_fewer_than_the_window():
    stage = Stage()
    scheduler = scheduler_of(stage.run_group, groups_per_step=2, max_staleness=3, window=3)
    async with running(scheduler):
        stage.end(*range(1, 20))
        assert indices(await next_of(scheduler)) == [1, 2]
        waiting = asyncio.ensure_future(next_of(scheduler))
        await settle()
        assert not waiting.done()  # six others have finished, but 0 is overtaken by two already
        stage.end(0)
        assert indices(await waiting) == [0, 3]


async def test_capacity_goes_to_the_next_group_as_soon_as_siblings_finish():
    stage = Stage()
    scheduler = scheduler_of(stage.run_group, group_size=4, groups_per_step=1, max_staleness=5, max_running_rollouts=10)
    async with running(scheduler):
        await settle()
        assert stage.started == [0, 1]  # eight rollouts; four more would be twelve
        stage.leases[0].rollout_finished(Rollout("0/0", "0", 0, None))
        await settle()
        assert stage.started == [0, 1]
        stage.leases[1].rollout_finished(Rollout("1/0", "1", 0, None))
        await settle()
        assert stage.started == [0, 1, 2]
        assert scheduler.rollouts_in_flight == 10


async def test_game_counts_once_for_all_its_seats():
    stage = Stage()
    scheduler = scheduler_of(stage.run_group, group_size=2, groups_per_step=1, max_staleness=5, max_running_rollouts=4)
    async with running(scheduler):
        await settle()
        assert stage.started == [0, 1]
        for sibling, seat in ((0, "first"), (0, "second"), (1, "first"), (1, "second")):
            stage.leases[0].rollout_finished(Rollout(f"0/{sibling}/{seat}", "0", sibling, None, seat=seat))
            await settle()
            assert stage.started == ([0, 1] if sibling == 0 else [0, 1, 2])
        assert scheduler.rollouts_in_flight == 4


async def test_tail_batch_suspends_overtaken_groups_until_needed():
    stage = Stage()
    scheduler = scheduler_of(
        stage.run_group, groups_per_step=2, max_staleness=0, oversample=1.0, window=5, tail="tail_batch"
    )
    async with running(scheduler):
        stage.end(1, 2)
        batch = await next_of(scheduler)
        assert indices(batch) == [1, 2]
        assert [index for index, lease in stage.leases.items() if lease.suspension.is_suspended] == [0]
        batch.release()
        await settle()
        assert stage.started == [0, 1, 2, 3, 4, 5]
        stage.end(0, 3, 4, 5)
        assert indices(await next_of(scheduler)) == [3, 4]
        assert stage.leases[0].suspension.is_suspended
        assert indices(await next_of(scheduler)) == [0, 5]  # 0 resumes when no batch is possible without it


async def test_suspended_group_waits_for_capacity_when_due():
    stage = Stage()
    knobs = {"groups_per_step": 1, "max_staleness": 3, "window": 9, "tail": "tail_batch", "max_running_rollouts": 4}
    scheduler = scheduler_of(stage.run_group, group_size=2, **knobs)
    async with running(scheduler):
        stage.end(1)
        assert indices(await next_of(scheduler)) == [1]
        await settle()
        assert stage.started == [0, 1, 2, 3]  # in place of 0, which is suspended
        waiting = asyncio.ensure_future(next_of(scheduler))
        await settle()
        assert scheduler.rollouts_in_flight == 4  # 0 is due, but there is no capacity for it
        assert stage.leases[0].suspension.is_suspended
        stage.end(2)
        assert indices(await waiting) == [2]
        await settle()
        assert not stage.leases[0].suspension.is_suspended
        assert scheduler.rollouts_in_flight == 4


async def test_unfinished_group_is_dropped_at_the_tail_age():
    stage, journal = Stage(), Journal()
    scheduler = scheduler_of(
        stage.run_group,
        groups_per_step=1,
        max_staleness=0,
        oversample=1,
        window=5,
        tail=2,
        observer=journal,
    )
    async with running(scheduler):
        stage.end(*range(1, 9))
        for version in (1, 2):
            assert journal.lost == []
            batch = await next_of(scheduler)
            stage.version = version
            batch.release()
        await settle()
    assert (journal.lost, stage.cancelled[:1]) == ([0], [0])


class Stubborn(Stage):
    """Groups that clean up for a while when they are cancelled, and then end as `end` says."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.clean_up = asyncio.Event()
        self._end = end

    async def run_group(self, lease: Lease) -> RolloutGroup:
        try:
            return await super().run_group(lease)
        except asyncio.CancelledError:
            await self.clean_up.wait()
            for sibling in range(2):
                lease.rollout_finished(Rollout(f"{lease.index}/{sibling}", str(lease.index), sibling, None))
            if self._end == "obey":
                raise
            if self._end == "fail":
                raise ValueError("it broke while it was cleaning up") from None
            return group_of(lease.index, 0)


@pytest.mark.parametrize("end", ["obey", "fail", "return"])
async def test_dropped_group_returns_its_permits_once_when_it_ends(end):
    stage, journal = Stubborn(end), Journal()
    knobs = {"groups_per_step": 1, "max_staleness": 0, "oversample": 1, "window": 5, "tail": "drop"}
    scheduler = scheduler_of(stage.run_group, group_size=2, max_running_rollouts=4, observer=journal, **knobs)
    async with running(scheduler) as run:
        stage.end(1)
        batch = await next_of(scheduler)
        stage.version = 1
        batch.release()
        await settle()
        assert journal.lost == stage.cancelled == [0]
        assert scheduler.slots_held == 2  # the dropped group holds no slot
        assert scheduler.rollouts_in_flight == 4  # its two rollouts still run, as do those of group 2
        assert stage.started == [0, 1, 2]
        stage.clean_up.set()
        await settle()
        assert stage.started == [0, 1, 2, 3]
        assert scheduler.rollouts_in_flight == 4
        assert journal.lost == [0]
        assert 0 not in journal.done
        assert not run.done()


async def test_admitted_group_can_be_dropped_before_it_starts():
    stage, journal = Stage(), Journal()
    scheduler = scheduler_of(
        stage.run_group, groups_per_step=1, max_staleness=1, tail="drop", max_running_rollouts=3, observer=journal
    )
    async with running(scheduler):
        stage.end(0, 1)
        first, second = await next_of(scheduler), await next_of(scheduler)
        stage.version = 1
        first.release()
        for _ in range(10):
            if scheduler.next_index == 3:  # group 2 is admitted, and has not begun
                break
            await asyncio.sleep(0)
        assert stage.started == [0, 1]
        stage.version = 2
        second.release()
        await settle()
        assert journal.lost == [2]
        assert stage.started == [0, 1, 3, 4]
        assert scheduler.rollouts_in_flight == 2


async def test_stray_cancellation_in_a_group_is_a_failure():
    closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    closed.cancel()

    async def run_group(lease: Lease) -> RolloutGroup:
        await closed
        raise AssertionError("unreachable")

    async with running(scheduler := scheduler_of(run_group, groups_per_step=1)):
        with pytest.raises(StrayCancellationError, match="group-0"):
            await next_of(scheduler)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_cancelling_a_group_task_from_outside_ends_the_run(has_begun):
    stage = Stage()
    scheduler = scheduler_of(stage.run_group, groups_per_step=2)
    run = asyncio.ensure_future(scheduler.run())
    waiting = asyncio.ensure_future(next_of(scheduler))
    for _ in range(10):
        if tasks := [task for task in asyncio.all_tasks() if task.get_name() == "group-1"]:
            break
        await asyncio.sleep(0)
    if has_begun:
        await settle()
    assert (1 in stage.started) is has_begun
    tasks[0].cancel()
    with pytest.raises(StrayCancellationError, match="group-1 was cancelled"):
        await waiting
    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(run, HANG_S)
    assert scheduler.slots_held == scheduler.rollouts_in_flight == 0


async def test_group_that_cancels_its_own_task_ends_the_run():
    async def run_group(lease: Lease) -> RolloutGroup:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        raise AssertionError("unreachable")

    with pytest.raises(StrayCancellationError, match="group-0"):
        async with asyncio.timeout(HANG_S), scheduler_of(run_group, groups_per_step=1) as scheduler:
            await scheduler.next_batch()


async def test_last_batch_is_short_when_the_budget_is_not_a_multiple():
    stage = Stage()
    stage.end(*range(9))
    scheduler = scheduler_of(stage.run_group, budget=5, groups_per_step=2, max_staleness=0)
    trained: list[list[int]] = []
    async with scheduler:
        async for batch in scheduler.batches():
            trained.append(indices(batch))
            stage.version += 1
    assert trained == [[0, 1], [2, 3], [4]]
    assert scheduler.slots_held == 0


@pytest.mark.parametrize("tail", ["tail_batch", "drop"])
async def test_short_last_batch_of_interrupted_groups(tail):
    stage = Stage()
    scheduler = scheduler_of(
        stage.run_group, budget=3, groups_per_step=2, max_staleness=0, oversample=1.0, window=5, tail=tail
    )
    async with running(scheduler) as run:
        stage.end(1, 2)
        batch = await next_of(scheduler)
        assert indices(batch) == [1, 2]
        batch.release()
        stage.end(0, 3)
        (await next_of(scheduler)).release()
        await asyncio.wait_for(run, HANG_S)


async def test_next_batch_error_gives_the_reason():
    stage = Stage()
    stage.end(*range(9))
    scheduler = scheduler_of(stage.run_group, budget=2, groups_per_step=2)
    async with running(scheduler) as run:
        await next_of(scheduler)
        await asyncio.wait_for(run, HANG_S)
        with pytest.raises(TrainingError, match="all groups of the budget have been handed out"):
            await next_of(scheduler)

    scheduler = scheduler_of(Stage().run_group, groups_per_step=1)
    async with running(scheduler):
        waiting = asyncio.ensure_future(next_of(scheduler))
        await settle()
    with pytest.raises(TrainingError, match=r"GroupScheduler\.run was cancelled"):
        await waiting
    assert scheduler.slots_held == scheduler.rollouts_in_flight == 0


async def test_group_failure_is_raised_while_others_clean_up():
    stage = Stubborn("obey")
    failing = asyncio.Event()

    async def run_group(lease: Lease) -> RolloutGroup:
        if lease.index:
            return await stage.run_group(lease)
        await failing.wait()
        raise RuntimeError("broken reward")

    scheduler = scheduler_of(run_group, groups_per_step=2)
    run = asyncio.ensure_future(scheduler.run())
    waiting = asyncio.ensure_future(next_of(scheduler))
    await settle()
    failing.set()
    with pytest.raises(RuntimeError, match="broken reward"):
        await waiting
    assert not run.done()
    stage.clean_up.set()
    with pytest.raises(ExceptionGroup):
        await run


async def test_run_cancellation_is_raised_while_groups_clean_up():
    stage = Stubborn("obey")
    scheduler = scheduler_of(stage.run_group, groups_per_step=2)
    run = asyncio.ensure_future(scheduler.run())
    waiting = asyncio.ensure_future(next_of(scheduler))
    await settle()
    run.cancel()
    with pytest.raises(TrainingError, match=r"GroupScheduler\.run was cancelled"):
        await waiting
    assert not run.done()
    stage.clean_up.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert scheduler.slots_held == scheduler.rollouts_in_flight == 0


@pytest.mark.parametrize("is_waited_for", [True, False])
async def test_run_cancellation_before_its_first_turn_is_raised(is_waited_for: bool):
    stage = Stage()
    scheduler = scheduler_of(stage.run_group, groups_per_step=1)
    waiting = [asyncio.ensure_future(next_of(scheduler))] if is_waited_for else []
    run = asyncio.ensure_future(scheduler.run())
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    for batch in waiting or [next_of(scheduler)]:
        with pytest.raises(TrainingError, match=r"GroupScheduler\.run was cancelled"):
            await batch
    assert not stage.started
    assert scheduler.slots_held == scheduler.rollouts_in_flight == 0


async def test_run_can_be_awaited_directly_and_only_once():
    stage = Stage()
    stage.end(0)
    scheduler = scheduler_of(stage.run_group, budget=1, groups_per_step=1)

    async def play() -> None:
        await scheduler.run()

    playing = asyncio.ensure_future(play())
    await settle()
    assert indices(await next_of(scheduler)) == [0]
    await asyncio.wait_for(playing, HANG_S)
    with pytest.raises(RuntimeError, match="called once"):
        scheduler.run()


async def test_next_batch_of_a_scheduler_that_does_not_run_raises():
    with pytest.raises(RuntimeError, match="enter its block, or call run"):
        await next_of(scheduler_of(Stage().run_group))


@pytest.mark.parametrize("turns", range(4))
async def test_scheduler_block_ends_when_cancelled_at_any_turn(turns: int):
    stage = Stage()
    scheduler = scheduler_of(stage.run_group, groups_per_step=1)

    async def loop() -> None:
        async with scheduler:
            await scheduler.next_batch()

    looping = asyncio.ensure_future(loop())
    for _ in range(turns):
        await asyncio.sleep(0)
    looping.cancel()
    _, left = await asyncio.wait([looping], timeout=HANG_S)
    assert not left
    assert looping.cancelled()
    assert scheduler.slots_held == scheduler.rollouts_in_flight == 0


async def test_cancelling_the_scheduler_task_from_outside_is_raised():
    async with scheduler_of(Stage().run_group, groups_per_step=1) as scheduler:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with pytest.raises(TrainingError, match=r"GroupScheduler\.run was cancelled"):
            await next_of(scheduler)


async def test_scheduler_block_raises_the_error_of_a_group():
    async def run_group(lease: Lease) -> RolloutGroup:
        raise RuntimeError("broken reward")

    for wait in (asyncio.Event().wait, None):
        with pytest.raises(RuntimeError, match="broken reward"):
            async with asyncio.timeout(HANG_S), scheduler_of(run_group, groups_per_step=1) as scheduler:
                await (wait or scheduler.next_batch)()


async def test_error_in_the_scheduler_block_cancels_the_groups():
    stage = Stage()
    scheduler = scheduler_of(stage.run_group, groups_per_step=1, max_staleness=1)

    async def block() -> None:
        async with scheduler:
            await settle()
            raise KeyError("trainer")

    with pytest.raises(KeyError, match="trainer"):
        await block()
    assert sorted(stage.cancelled) == [0, 1]
    assert scheduler.slots_held == scheduler.rollouts_in_flight == 0


async def test_leaving_or_cancelling_the_scheduler_block_cancels_the_groups():
    stage = Stage()
    async with scheduler_of(stage.run_group, groups_per_step=1, max_staleness=0) as scheduler:
        stage.end(0)
        async for _batch in scheduler.batches():
            break
    stage = Stage()

    async def block() -> None:
        async with scheduler_of(stage.run_group, groups_per_step=1, max_staleness=0) as scheduler:
            await scheduler.next_batch()

    task = asyncio.ensure_future(block())
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.cancelled == [0]


async def test_backlog_batches_that_cannot_be_repeated_are_rejected():
    backlog = Backlog(next_index=3, unsettled=[0, 1, 2], finished={2: group_of(2, 0)}, batches=[[0, 2]])
    stage = Stage()
    with pytest.raises(
        ConfigError, match=r"groups \[0, 2\] .* only 1 of its groups would start in the 1 slots that .*groups_per_step"
    ):
        scheduler_of(stage.run_group, groups_per_step=1, max_staleness=0, backlog=backlog)
    with pytest.raises(ConfigError, match="with 1 groups more to train"):
        scheduler_of(stage.run_group, groups_per_step=2, budget=1, backlog=backlog)
    scheduler_of(stage.run_group, groups_per_step=1, max_staleness=1, backlog=backlog)


async def test_groups_of_repeated_batches_are_admitted_first():
    stage = Stage()
    backlog = Backlog(next_index=3, unsettled=[0, 1, 2], finished={2: group_of(2, 0)}, batches=[[0, 2]])
    scheduler = scheduler_of(stage.run_group, groups_per_step=2, max_staleness=0, backlog=backlog)
    async with running(scheduler):
        await settle()
        assert stage.started == [0]
        stage.end(0)
        batch = await next_of(scheduler)
        assert indices(batch) == [0, 2]
        batch.release()
        await settle()
        assert stage.started == [0, 1, 3]


async def test_restored_group_with_stale_tokens_is_regenerated_in_its_slot():
    stage, journal = Stage(), Journal()
    discarded: list[int] = []
    journal.discarded = lambda index, group: discarded.append(index)
    journal.batches = [[], [], []]
    stage.version = 3
    backlog = Backlog(next_index=2, unsettled=[0, 1], finished={0: group_of(0, 3), 1: group_of(1, 1)})
    scheduler = scheduler_of(
        stage.run_group, groups_per_step=2, max_staleness=1, version=3, backlog=backlog, observer=journal
    )
    async with running(scheduler):
        batch = asyncio.ensure_future(next_of(scheduler))
        await settle()
        assert discarded == [1]
        assert not batch.done()
        assert stage.started == [2, 3, 1]
        assert scheduler.slots_held == 4
        stage.end(1)
        trained = await batch
        assert indices(trained) == [0, 1]
        assert {version for group in trained.groups for version in group.versions} == {3}


async def test_restored_group_is_regenerated_only_once():
    """A regenerated group that is too old again has a wrong version from its generator."""
    stage = Stage()
    stage.end(0)
    backlog = Backlog(next_index=1, unsettled=[0], finished={0: group_of(0, 1)})
    scheduler = scheduler_of(stage.run_group, groups_per_step=1, max_staleness=0, version=3, backlog=backlog)
    async with running(scheduler):
        with pytest.raises(TrainingError, match="a token of version 0 reached the step from version 3"):
            await next_of(scheduler)
    assert stage.started == [0]


async def test_aborted_group_is_counted_as_aborted():
    async def run_group(lease: Lease) -> RolloutGroup:
        group = group_of(lease.index, 0)
        group.rollouts[0].status = RolloutStatus.ABORTED
        return group

    journal = Journal()
    journal.dropped = lambda step, index, reason, group: journal.lost.append(reason)
    config = SchedulingConfig(groups_per_step=1, max_refills=1)
    scheduler = GroupScheduler(run_group, config, group_size=1, budget=4, observer=journal)
    async with running(scheduler):
        with pytest.raises(TrainingError, match=r"aborted \("):
            await next_of(scheduler)
    assert set(journal.lost) == {"aborted"}


async def test_backlog_is_continued_where_it_was_left():
    stage, journal = Stage(), Journal()
    backlog = Backlog(next_index=8, unsettled=[4, 5, 6], finished={6: group_of(6, 0), 5: group_of(5, 0)}, batches=[[6]])
    scheduler = scheduler_of(stage.run_group, groups_per_step=1, max_staleness=3, backlog=backlog, observer=journal)
    async with running(scheduler):
        await settle()
        assert stage.started == [4, 8]
        stage.end(4, 8)
        trained = [indices(await next_of(scheduler)) for _ in range(4)]
    assert trained == [[6], [4], [5], [8]]
    assert journal.batches == trained
    assert sorted(journal.done) == [4, 8]  # the others were reported before


async def test_dropping_every_group_ends_the_run_with_the_reasons():
    stage = Stage()
    stage.end(*range(100))
    scheduler = scheduler_of(
        stage.run_group, groups_per_step=2, max_staleness=0, filters=[lambda group: "too dull"], max_refills=2
    )
    async with running(scheduler):
        with pytest.raises(TrainingError, match=r"too dull \(\d+\); raise scheduling.max_refills = 2"):
            await next_of(scheduler)


@pytest.mark.parametrize("num_dropped", [4, 5])
async def test_max_refills_allows_so_many_drops_per_group_of_a_step(num_dropped: int):
    stage = Stage()
    stage.end(*range(20))
    dull = [str(index) for index in range(num_dropped)]
    scheduler = scheduler_of(
        stage.run_group,
        groups_per_step=2,
        max_staleness=0,
        max_refills=2,
        filters=[lambda group: "too dull" if group.group_id in dull else None],
    )
    async with running(scheduler):
        if num_dropped <= 4:
            assert indices(await next_of(scheduler)) == [4, 5]
        else:
            with pytest.raises(TrainingError, match=r"5 groups in a row could not be trained on: too dull \(5\)"):
                await next_of(scheduler)


@pytest.mark.parametrize("groups_per_step", [1, 2, 16])
async def test_reward_that_always_fails_ends_the_run_with_its_error(groups_per_step: int):
    async def run_group(lease: Lease) -> RolloutGroup:
        group = group_of(lease.index, 0)
        group.failure = Failure("KeyError: 'answer'", "task.py:31 in score", "Traceback")
        return group

    config = SchedulingConfig(groups_per_step=groups_per_step)
    scheduler = GroupScheduler(run_group, config, group_size=1, budget=64)
    async with running(scheduler):
        with pytest.raises(TrainingError, match=r"\d+ groups in a row were lost to errors, .*KeyError: 'answer'"):
            await next_of(scheduler)


async def test_too_many_drops_at_a_release_fail_a_waiting_next_batch():
    stage = Stage()
    knobs = {"max_staleness": 1, "oversample": 2.0, "tail": "drop", "max_refills": 1}
    scheduler = scheduler_of(stage.run_group, groups_per_step=1, **knobs)
    async with running(scheduler):
        stage.end(0)
        first = await next_of(scheduler)
        waiting = asyncio.ensure_future(next_of(scheduler))
        await settle()
        first.release()
        with pytest.raises(TrainingError, match=r"too_old \(3\); raise scheduling.max_refills = 1"):
            await waiting


async def test_finished_group_resets_the_count_of_failed_groups():
    async def run_group(lease: Lease) -> RolloutGroup:
        group = group_of(lease.index, lease.version)
        if lease.index % 3 != 2:
            group.failure = Failure("KeyError: 'answer'", "task.py:31 in score", "Traceback")
        return group

    config = SchedulingConfig(groups_per_step=1, max_staleness=0, max_failed_groups=3)
    scheduler = GroupScheduler(run_group, config, group_size=1, budget=5, filters=[failed])
    trained: list[int] = []
    async with scheduler:
        async for batch in scheduler.batches():
            trained += indices(batch)
    assert trained == [2, 5, 8, 11, 14]


def failed(group: RolloutGroup) -> str | None:
    return "reward_failed" if group.failure is not None else None


async def test_consecutive_failed_groups_end_the_run_with_the_main_error():
    places = {0: "env.py:3 in reset", 1: "env.py:7 in step", 2: "env.py:7 in step"}

    async def run_group(lease: Lease) -> RolloutGroup:
        group = group_of(lease.index, 0)
        (rollout,) = group.rollouts
        rollout.status = RolloutStatus.ERROR_ENV
        rollout.failure = Failure(f"ConnectionError: sandbox {lease.index} is gone", places[lease.index], "Traceback")
        return group

    knobs = {"groups_per_step": 3, "max_staleness": 0, "max_refills": 100, "max_failed_groups": 3}
    scheduler = GroupScheduler(run_group, SchedulingConfig(**knobs), group_size=1, budget=3)
    async with running(scheduler):
        with pytest.raises(TrainingError) as ended:
            await next_of(scheduler)
    assert (
        "3 groups in a row were lost to errors, 2 of their 3 rollouts to "
        "error_env: ConnectionError: sandbox 1 is gone (env.py:7 in step)"
    ) in str(ended.value)


@pytest.mark.looptime
async def test_failed_groups_before_the_first_next_batch_are_limited():
    played = []

    async def run_group(lease: Lease) -> RolloutGroup:
        played.append(lease.index)
        await asyncio.sleep(1)
        group = group_of(lease.index, 0)
        group.rollouts[0].status = RolloutStatus.ERROR_ENV
        group.rollouts[0].failure = Failure("ConnectionError: the sandbox is gone", "env.py:3 in reset", "Traceback")
        return group

    knobs = {"groups_per_step": 2, "max_staleness": 0, "max_failed_groups": 8}
    scheduler = GroupScheduler(run_group, SchedulingConfig(**knobs), group_size=1, budget=8)
    async with running(scheduler):
        await asyncio.sleep(1000)
        assert len(played) <= 8 + 2
        with pytest.raises(TrainingError, match=r"groups in a row were lost to errors.*the sandbox is gone"):
            await next_of(scheduler)


async def test_failing_group_ends_the_run_with_its_error():
    async def run_group(lease: Lease) -> RolloutGroup:
        raise RuntimeError("broken reward")

    with pytest.raises(ExceptionGroup) as caught:
        await scheduler_of(run_group, groups_per_step=1).run()
    assert caught.group_contains(RuntimeError, match="broken reward")


class PanicException(BaseException):
    """Exception like the one that a panic in a Rust extension raises."""


@pytest.mark.parametrize("error", [PanicException("out of bounds"), GeneratorExit("out of bounds")])
async def test_base_exception_in_a_group_ends_the_run_with_its_reason(error: BaseException):
    async def run_group(lease: Lease) -> RolloutGroup:
        raise error

    reason = f"group-0 raised {type(error).__name__}: out of bounds .*test_scheduler.py:"
    scheduler = scheduler_of(run_group, groups_per_step=1)
    async with running(scheduler):
        with pytest.raises(TrainingError, match=reason) as caught:
            await next_of(scheduler)
    assert caught.value.__cause__ is error
    with pytest.raises(TrainingError, match=reason):
        async with scheduler_of(run_group, groups_per_step=1) as scheduler:
            await asyncio.sleep(5)


async def test_token_beyond_the_age_bound_stops_the_run():
    stage = Stage()
    stage.end(*range(9))
    scheduler = scheduler_of(stage.run_group, groups_per_step=1, max_staleness=0)
    async with running(scheduler):
        (await next_of(scheduler)).release()  # but stage.version stays 0
        with pytest.raises(TrainingError, match="max_staleness = 0"):
            await next_of(scheduler)


async def test_releasing_a_batch_twice_raises():
    stage = Stage()
    stage.end(0)
    async with running(scheduler := scheduler_of(stage.run_group, groups_per_step=1)):
        batch = await next_of(scheduler)
        batch.release()
        with pytest.raises(AssertionError, match="exactly once"):
            batch.release()


async def test_batches_must_be_released_in_the_order_of_their_steps():
    stage = Stage()
    stage.end(*range(4))
    async with running(scheduler := scheduler_of(stage.run_group, groups_per_step=1, max_staleness=2)):
        first, second = await next_of(scheduler), await next_of(scheduler)
        with pytest.raises(RuntimeError, match="step 2 is released before that of step 1"):
            second.release()
        assert scheduler.slots_held == 3
        first.release()
        second.release()
        third = await next_of(scheduler)
        assert third.version == 2


@pytest.mark.looptime
async def test_metrics_count_slot_seconds_drops_and_accepted_tokens():
    stage = Stage()
    scheduler = scheduler_of(
        stage.run_group,
        groups_per_step=1,
        max_staleness=0,
        oversample=1.0,
        filters=[lambda group: "picked" if group.group_id == "0" else None],
    )
    async with running(scheduler):
        await asyncio.sleep(2.0)
        stage.end(0)
        await asyncio.sleep(3.0)
        stage.end(1)
        metrics = (await next_of(scheduler)).metrics
    assert metrics["slot_s/running"] == 2 * 2.0 + 2 * 3.0
    assert metrics["dropped/picked"] == 1
    assert metrics["wasted_tokens"] == 2
    assert metrics["age/0"] == 1
    assert metrics["accepted_tokens_mean"] == metrics["generated_tokens_mean"] == 2


async def test_group_of_only_stale_tokens_is_dropped_and_replaced():
    stage, journal = Stage(), Journal()
    scheduler = scheduler_of(
        stage.run_group, groups_per_step=1, max_staleness=2, window=3, max_token_age=1, observer=journal
    )
    async with running(scheduler):
        stage.end(0, 1, 2)
        for version in (1, 2):
            batch = await next_of(scheduler)
            stage.version = version
            batch.release()
        stage.end(3)
        assert indices(await next_of(scheduler)) == [3]  # 2 has only tokens of version 0
        assert journal.lost == [2]


async def test_group_of_only_stale_tokens_is_kept_when_masking():
    stage, journal = Stage(), Journal()
    knobs = {"groups_per_step": 2, "max_staleness": 2, "max_token_age": 1, "stale_groups": "mask"}
    scheduler = scheduler_of(stage.run_group, observer=journal, **knobs)
    async with running(scheduler):
        stage.end(0, 1, 2, 3, 4)
        for version in (1, 2):
            batch = await next_of(scheduler)
            stage.version = version
            batch.release()
        stage.end(5)
        assert indices(await next_of(scheduler)) == [4, 5]  # 4 has only tokens of version 0
        assert journal.lost == []


async def test_batch_of_only_stale_tokens_is_dropped_even_when_masking():
    stage, journal = Stage(), Journal()
    knobs = {"groups_per_step": 1, "max_staleness": 1, "max_token_age": 0, "stale_groups": "mask"}
    scheduler = scheduler_of(stage.run_group, observer=journal, **knobs)
    async with running(scheduler):
        stage.end(0, 1)
        batch = await next_of(scheduler)
        stage.version = 1
        batch.release()
        stage.end(2, 3)
        assert indices(await next_of(scheduler)) == [2]
        assert journal.lost == [1]


def test_stale_groups_setting_requires_max_token_age():
    with pytest.raises(ValidationError, match='stale_groups = "mask" has no effect without max_token_age'):
        SchedulingConfig(stale_groups="mask")


@pytest.mark.parametrize("unsettled", [[2, 2], [9], [-1]])
def test_backlog_with_invalid_unsettled_groups_is_rejected(unsettled: list[int]) -> None:
    with pytest.raises(ValueError, match=r"Backlog\.unsettled"):
        Backlog(next_index=4, unsettled=unsettled)
