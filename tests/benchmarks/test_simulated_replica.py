"""The simulated replica takes many steps at once, with the same results as single steps."""

import asyncio
import random
from statistics import fmean

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import in_virtual_time

from benchmarks.simulated_replica import SimulatedReplica
from benchmarks.simulation import log_normal_with_tail
from titan_rl import FinishReason, SamplingParams
from titan_rl.generation.adaptive_batch import AdaptiveLimit
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.scripted_engine import CostModel, ScriptedEngine
from titan_rl.generation.types import PauseMode

STOP = 9
COST = CostModel(step=1.0, request=0.25, prompt_token=0.125, context_token=1 / 256, load=3.0)  # exact in binary


def step_by_step(requests, max_running):
    """When each request finishes behind a `ScriptedEngine`: (seconds, tokens)."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    lengths = {10 + index: length for index, (_, length) in enumerate(requests)}
    engine = ScriptedEngine(
        script=lambda context: STOP if len(context) == lengths[context[0]] else 1,
        max_running=max_running,
        cost=COST,
        sleep=sleep,
    )
    waiting = sorted(range(len(requests)), key=lambda index: requests[index][0])
    finished, tokens = {}, dict.fromkeys(map(str, waiting), 0)
    running = 0
    while waiting or running:
        if not running and requests[waiting[0]][0] > now:
            now = requests[waiting[0]][0]
        while waiting and requests[waiting[0]][0] <= now:
            index = waiting.pop(0)
            sampling = SamplingParams(max_tokens=50, stop_token_ids=(STOP,))
            engine.add(EngineRequest(str(index), [10 + index], sampling))
            running += 1
        for delta in engine.step():
            tokens[delta.request_id] += len(delta.token_ids)
            if delta.finish_reason is not None:
                running -= 1
                finished[int(delta.request_id)] = (now, tokens[delta.request_id])
    return finished


async def at_once(requests, max_running):
    replica = SimulatedReplica(
        "r",
        lambda request_id, context: requests[int(request_id)][1] + 1 - context,
        COST,
        max_running=max_running,
        kv_tokens=10_000,
    )
    loop, finished = asyncio.get_running_loop(), {}

    async def send(index: int, arrival: float) -> None:
        await asyncio.sleep(arrival)
        sampling = SamplingParams(max_tokens=50)
        completion = await replica.generate([0], request_id=str(index), sampling=sampling)
        finished[index] = (loop.time(), len(completion.token_ids))

    serving = asyncio.ensure_future(replica.run())
    await asyncio.gather(*(send(index, arrival) for index, (arrival, _) in enumerate(requests)))
    serving.cancel()
    return finished


@settings(max_examples=examples(40), deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=8),
    max_running=st.integers(1, 4),
)
def test_finish_times_match_a_stepwise_simulation(requests, max_running):
    requests = [(arrival + (index + 1) / 1024, length) for index, (arrival, length) in enumerate(requests)]
    leaping, stepping = in_virtual_time(at_once(requests, max_running)), step_by_step(requests, max_running)
    assert leaping.keys() == stepping.keys()
    for index, (seconds, num_tokens) in stepping.items():
        assert leaping[index] == (pytest.approx(seconds, abs=1e-4), num_tokens)  # the clock has microseconds


def test_pulls_aborts_and_pauses_happen_between_two_steps():
    async def scenario() -> None:
        cost = CostModel(step=1.0, load=3.0)
        replica = SimulatedReplica(
            "r", lambda request_id, context: 101 - context, cost, max_running=4, kv_tokens=10_000
        )
        loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(replica.run())
        sampling = SamplingParams(max_tokens=200)
        request = asyncio.ensure_future(replica.generate([0], request_id="a", sampling=sampling))
        await asyncio.sleep(10.5)
        await replica.pull(7)
        assert loop.time() == 14.0  # the step under way, then the load
        await asyncio.sleep(5.5)
        await replica.pause(PauseMode.KEEP)
        await asyncio.sleep(100)
        await replica.resume()
        await asyncio.sleep(2.5)
        await replica.abort(["a"])
        completion = await request
        assert completion.finish_reason is FinishReason.ABORT
        assert [(span.version, span.num_tokens) for span in completion.version_spans] == [(0, 11), (7, 9)]
        rest = await replica.generate([0] * 21, request_id="a", sampling=sampling)
        assert len(rest.token_ids) == 80
        serving.cancel()

    in_virtual_time(scenario())


def test_cancelled_pull_does_not_affect_other_pulls():
    async def scenario() -> None:
        replica = SimulatedReplica(
            "r", lambda request_id, context: 9, CostModel(load=3.0), max_running=4, kv_tokens=100
        )
        serving = asyncio.ensure_future(replica.run())
        cancelled, other = (asyncio.ensure_future(replica.pull(version)) for version in (1, 2))
        await asyncio.sleep(1.0)
        cancelled.cancel()
        assert await asyncio.wait_for(other, 10) == 2
        assert not serving.done()
        serving.cancel()

    in_virtual_time(scenario())


def test_full_kv_cache_makes_the_last_request_wait():
    async def scenario() -> dict[str, float]:
        replica = SimulatedReplica(
            "r", lambda request_id, context: 61 - context, CostModel(step=1.0), max_running=4, kv_tokens=100
        )
        loop, ends = asyncio.get_running_loop(), {}
        serving = asyncio.ensure_future(replica.run())

        async def send(name: str) -> None:
            completion = await replica.generate([0], request_id=name, sampling=SamplingParams(max_tokens=200))
            assert len(completion.token_ids) == 60
            ends[name] = loop.time()

        await asyncio.gather(send("a"), send("b"))
        serving.cancel()
        return ends

    ends = in_virtual_time(scenario())
    assert ends["a"] == 60
    assert 70 <= ends["b"] <= 75  # it was preempted after about 49 tokens


class Watched(AdaptiveLimit):
    """Adaptive limit that records its values."""

    def __init__(self, most, kv_tokens):
        super().__init__(most, kv_tokens)
        self.limits = []

    def num_joining(self, running, waiting, num_shared=0):
        count = super().num_joining(running, waiting, num_shared)
        self.limits.append(self.limit)
        return count


async def burst(lengths, *, max_running, kv_tokens, adaptive_limit=None):
    """Return the seconds and preemptions of answers that are requested at the same time."""
    cost = CostModel(step=0.02, request=0.02 / 128, prompt_token=1e-5)
    replica = SimulatedReplica(
        "r",
        lambda request_id, context: lengths[int(request_id)] + 256 - context,
        cost,
        max_running=max_running,
        kv_tokens=kv_tokens,
        adaptive_limit=adaptive_limit,
    )
    serving, sampling = asyncio.ensure_future(replica.run()), SamplingParams(max_tokens=4096)
    answers = [replica.generate(range(256), request_id=str(index), sampling=sampling) for index in range(len(lengths))]
    completions = await asyncio.gather(*answers)
    serving.cancel()
    assert [len(completion.token_ids) for completion in completions] == lengths
    return asyncio.get_running_loop().time(), replica.num_preemptions


def test_adaptive_limit_matches_the_best_fixed_one_with_fewer_preemptions():
    draws = random.Random(0)
    lengths = [max(1, round(300 * draws.lognormvariate(0, 0.5))) for _ in range(300)]
    room = {"kv_tokens": 64 * 450}
    fixed = {most: in_virtual_time(burst(lengths, max_running=most, **room)) for most in (128, 64, 32)}
    fastest = min(seconds for seconds, _ in fixed.values())
    adaptive_limit = Watched(128, **room)
    seconds, preemptions = in_virtual_time(burst(lengths, max_running=128, adaptive_limit=adaptive_limit, **room))
    assert seconds < 1.03 * fastest
    assert preemptions < 0.5 * fixed[128][1]
    assert preemptions < 0.5 * len(lengths)
    settled = adaptive_limit.limits[
        len(adaptive_limit.limits) // 4 : len(adaptive_limit.limits) // 2
    ]  # once lengths are known, ahead of the end
    assert max(settled) - min(settled) < 0.4 * max(settled)


@pytest.mark.parametrize("part", [1 / 8, 1 / 4])
def test_adaptive_limit_prevents_thrashing_of_a_small_cache(part):
    draw, draws = log_normal_with_tail(median=300, sigma=0.6, cap=2900), random.Random(0)
    lengths = [draw(draws) for _ in range(200)]
    room = {"kv_tokens": round(64 * part * (256 + fmean(lengths)))}
    fixed = {most: in_virtual_time(burst(lengths, max_running=most, **room)) for most in (64, round(64 * part))}
    seconds, preemptions = in_virtual_time(
        burst(lengths, max_running=64, adaptive_limit=AdaptiveLimit(64, **room), **room)
    )
    assert fixed[64][1] > len(lengths), "as many as there are places for preempt each other over and over"
    assert preemptions < 0.6 * len(lengths)
    assert seconds < min(seconds for seconds, _ in fixed.values()) / 0.97
