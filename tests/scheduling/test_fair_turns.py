"""Fair turns at one trainer, in virtual time."""

from __future__ import annotations

import asyncio

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.scheduling.fair_turns import FairTurns

DURATIONS = st.floats(min_value=0.3, max_value=3.0)


async def train(turns: FairTurns, name: str, step_s: float, gap_s: float) -> None:
    """Steps of one experiment, each with a publication, and the next batch ready after a gap."""
    while True:
        async with turns.turn(name):
            await asyncio.sleep(step_s)
        async with turns.turn(name, urgent=True):
            await asyncio.sleep(step_s / 100)
        await asyncio.sleep(gap_s)


def run(steps: list[tuple[float, float]], until_s: float) -> FairTurns:
    """Train experiments with steps and gaps of these lengths for some virtual time."""
    loop = looptime.new_event_loop()

    async def main() -> FairTurns:
        names = [str(number) for number in range(len(steps))]
        turns = FairTurns(names)
        tasks = [asyncio.ensure_future(train(turns, name, *step)) for name, step in zip(names, steps, strict=True)]
        await asyncio.sleep(until_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return turns

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(DURATIONS, min_size=2, max_size=5), gap=st.floats(min_value=0.0, max_value=0.05))
def test_ready_experiments_get_equal_shares_within_a_tenth(steps: list[float], gap: float) -> None:
    turns = run([(step_s, gap * max(steps)) for step_s in steps], until_s=100 * max(steps))
    used = [turns.used_s(str(number)) for number in range(len(steps))]
    assert max(used) <= 1.1 * min(used)


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.tuples(DURATIONS, st.floats(min_value=0.0, max_value=20.0)), min_size=1, max_size=6))
def test_trainer_hardly_idles_while_a_batch_is_ready(
    steps: list[tuple[float, float]],
) -> None:
    longest = max(step_s for step_s, _ in steps)
    turns = run([(longest, 0.0), *steps], until_s=50 * longest)  # the first is always ready
    used = sum(turns.used_s(str(number)) for number in range(len(steps) + 1))
    assert used >= 50 * longest * 0.85


@pytest.mark.looptime
async def test_next_turn_goes_to_the_experiment_with_the_least_time() -> None:
    turns, order = FairTurns("abc"), list[str]()

    async def step(name: str, seconds: float) -> None:
        async with turns.turn(name):
            order.append(name)
            await asyncio.sleep(seconds)

    await step("a", 5)
    await step("b", 3)
    async with asyncio.TaskGroup() as tasks, turns.turn("c"):
        for name in "abc":
            tasks.create_task(step(name, 1))
        await asyncio.sleep(1)
    assert order == ["a", "b", "c", "b", "a"]
    assert turns.share("a") == pytest.approx(6 / 12)


@pytest.mark.looptime
async def test_urgent_turn_precedes_waiting_steps() -> None:
    turns, order = FairTurns("ab"), list[str]()

    async def take(name: str, *, urgent: bool) -> None:
        async with turns.turn(name, urgent=urgent):
            order.append(f"{name} {urgent}")

    async with asyncio.TaskGroup() as tasks, turns.turn("a"):
        tasks.create_task(take("b", urgent=False))
        await asyncio.sleep(0)
        tasks.create_task(take("a", urgent=True))
        await asyncio.sleep(1)
    assert order == ["a True", "b False"]


@pytest.mark.looptime
async def test_cancelled_experiment_releases_the_trainer() -> None:
    turns, entered = FairTurns("abc"), asyncio.Event()

    async def step(name: str) -> None:
        async with turns.turn(name):
            entered.set()
            await asyncio.sleep(1000)

    running, waiting = asyncio.ensure_future(step("a")), asyncio.ensure_future(step("b"))
    await entered.wait()
    await asyncio.sleep(1)
    waiting.cancel()
    running.cancel()
    async with asyncio.timeout(5), turns.turn("c"):
        pass
    granted = asyncio.ensure_future(turns.turn("a").__aenter__())
    granted.cancel()  # before it has run at all
    async with asyncio.timeout(5), turns.turn("b"):
        pass


@pytest.mark.looptime
async def test_idle_experiment_keeps_the_credit_of_one_turn() -> None:
    turns = FairTurns("ab")
    for _ in range(100):
        async with turns.turn("a"):
            await asyncio.sleep(1)
    order: list[str] = []

    async def steps(name: str) -> None:
        for _ in range(10):
            async with turns.turn(name):
                order.append(name)
                await asyncio.sleep(1)

    await asyncio.gather(steps("b"), steps("a"))
    assert "bbb" not in "".join(order[:15])


@pytest.mark.looptime
async def test_experiment_that_had_no_batch_overtakes_by_one_turn() -> None:
    turns, order = FairTurns("ab"), list[str]()
    for _ in range(100):
        async with turns.turn("a"):
            await asyncio.sleep(1)

    async def steps(name: str) -> None:
        for _ in range(4):
            async with turns.turn(name):
                order.append(name)
                await asyncio.sleep(1)

    await asyncio.gather(steps("a"), steps("b"))
    assert "".join(order).startswith("ababb")


@pytest.mark.looptime
async def test_trainer_is_kept_free_for_an_experiment_that_is_behind() -> None:
    turns, order = FairTurns("ab"), list[str]()

    async def step(name: str, seconds: float) -> None:
        async with turns.turn(name):
            order.append(name)
            await asyncio.sleep(seconds)

    await step("b", 100)  # the trainer is kept free for a tenth of it
    for _ in range(2):
        await step("a", 1)
        await asyncio.sleep(6)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(step("a", 1))
        tasks.create_task(step("b", 1))
        for _ in range(3):
            await asyncio.sleep(7)
            await step("a", 0)
    assert "".join(order) == "baaaaaab"
