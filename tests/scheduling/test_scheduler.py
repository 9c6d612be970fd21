"""GroupScheduler: the staleness bound, the slots, and what ends a run."""

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, Turn, VersionSpan
from titan_rl.errors import TrainingError
from titan_rl.scheduling.scheduler import GroupScheduler


def group_of(index: int, version: int) -> RolloutGroup:
    completion = Completion("r", [1], [0.0], FinishReason.STOP, [VersionSpan(version, 1)])
    rollout = Rollout(f"{index}/0", str(index), 0, None, turns=[Turn([0], completion)])
    return RolloutGroup(str(index), None, [rollout])


@contextlib.asynccontextmanager
async def running(scheduler: GroupScheduler):
    task = asyncio.get_running_loop().create_task(scheduler.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@settings(max_examples=60, deadline=None)
@given(
    per_step=st.integers(1, 3),
    staleness=st.integers(0, 3),
    steps=st.integers(1, 5),
    dropped=st.sets(st.integers(0, 12), max_size=3),
    yields=st.lists(st.integers(0, 7), min_size=1, max_size=20),
)
def test_bound_order_and_slots_hold_for_any_interleaving(per_step, staleness, steps, dropped, yields):
    async def scenario() -> None:
        version = 0

        async def run_group(index: int) -> RolloutGroup:
            sampled_with = version
            for _ in range(yields[index % len(yields)]):
                await asyncio.sleep(0)
            return group_of(index, sampled_with)

        scheduler = GroupScheduler(
            run_group,
            groups_per_step=per_step,
            max_staleness=staleness,
            budget=steps * per_step,
            drop_reason=lambda group: "picked" if int(group.group_id) in dropped else None,
            max_refills=13,
        )
        trained: list[int] = []
        async with running(scheduler):
            for step in range(steps):
                batch = await asyncio.wait_for(scheduler.next_batch(), 5)
                assert all(step - v <= staleness for group in batch.groups for v in group.versions)
                assert scheduler.slots_held <= (staleness + 1) * per_step
                trained += [int(group.group_id) for group in batch.groups]
                await asyncio.sleep(0)
                version = step + 1
                batch.release()
            await asyncio.sleep(0)
            assert scheduler.slots_held == 0
        expected = [index for index in range(steps * per_step + len(dropped)) if index not in dropped]
        assert trained == expected[: steps * per_step]

    asyncio.run(scenario())


async def test_staleness_zero_admits_nothing_until_the_pull_is_done():
    admitted: list[int] = []

    async def run_group(index: int) -> RolloutGroup:
        admitted.append(index)
        return group_of(index, 0)

    scheduler = GroupScheduler(run_group, groups_per_step=2, max_staleness=0, budget=4)
    async with running(scheduler):
        batch = await scheduler.next_batch()
        for _ in range(10):
            await asyncio.sleep(0)
        assert admitted == [0, 1]
        batch.release()
        await scheduler.next_batch()
        assert admitted == [0, 1, 2, 3]


async def test_a_run_that_only_drops_ends_with_the_reasons():
    async def run_group(index: int) -> RolloutGroup:
        return group_of(index, 0)

    scheduler = GroupScheduler(
        run_group, groups_per_step=2, max_staleness=0, budget=2, drop_reason=lambda group: "too dull", max_refills=2
    )
    async with running(scheduler):
        with pytest.raises(TrainingError, match=r"too dull \(5\)"):
            await scheduler.next_batch()


async def test_a_failing_group_ends_the_run_with_its_error():
    async def run_group(index: int) -> RolloutGroup:
        raise RuntimeError("broken reward")

    scheduler = GroupScheduler(run_group, groups_per_step=1, max_staleness=0, budget=1)
    with pytest.raises(ExceptionGroup) as caught:
        await scheduler.run()
    assert caught.group_contains(RuntimeError, match="broken reward")


async def test_releasing_a_batch_twice_is_a_bug():
    async def run_group(index: int) -> RolloutGroup:
        return group_of(index, 0)

    scheduler = GroupScheduler(run_group, groups_per_step=1, max_staleness=0, budget=1)
    async with running(scheduler):
        batch = await scheduler.next_batch()
        batch.release()
        with pytest.raises(AssertionError, match="exactly once"):
            batch.release()
