"""Stall detection: a silent replica is detected, and queueing does not count as a stall. Virtual time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import in_virtual_time

from benchmarks.simulated_replica import SimulatedReplica
from titan_rl.core.errors import EngineStalledError, GenerationError
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router import GeneratorRouter, Limits, RoundRobin
from titan_rl.generation.router.pool import OnReplicaFailed, Pool, PooledReplica
from titan_rl.generation.router.replica import BackgroundTasks, OpenCalls
from titan_rl.generation.router.requests import RequestsInFlight
from titan_rl.generation.scripted_engine import CostModel
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk

pytestmark = pytest.mark.looptime

GROUP_SIZE, NUM_SLOTS, MAX_RUNNING, STREAM_INTERVAL = 8, 32, 64, 32
PROMPT_TOKENS = 16


def now() -> float:
    return asyncio.get_running_loop().time()


class Stage:
    """Two engines behind a router with default limits."""

    def __init__(self, num_tokens: int, step_s: float) -> None:
        self.num_tokens = num_tokens
        self.failed: list[tuple[str, Exception]] = []
        self.replicas = [
            SimulatedReplica(
                name,
                lambda request_id, context: PROMPT_TOKENS + num_tokens - context,
                CostModel(step=step_s),
                max_running=MAX_RUNNING,
                kv_tokens=1 << 40,
                stream_interval=STREAM_INTERVAL,
            )
            for name in "ab"
        ]
        self.engines = {replica.name: asyncio.ensure_future(replica.run()) for replica in self.replicas}
        self.router = GeneratorRouter(
            self.replicas, on_replica_failed=lambda replica, error: self.failed.append((replica.name, error))
        )

    def ask(self, request_id: str) -> asyncio.Task[Completion]:
        sampling = SamplingParams(max_tokens=1 << 20)
        answer = self.router.generate([0] * PROMPT_TOKENS, request_id=request_id, sampling=sampling)
        return asyncio.create_task(answer)

    def hang(self, name: str) -> None:
        """Stop the engine of a replica, which then takes no steps and ignores calls."""
        self.engines[name].cancel()

    @property
    def num_computed(self) -> int:
        return sum(replica.num_tokens for replica in self.replicas)


@asynccontextmanager
async def staged(num_tokens: int, step_s: float) -> AsyncIterator[Stage]:
    stage = Stage(num_tokens, step_s)
    await stage.router.pull_state_dict(0)
    yield stage
    await stage.router.close()
    for engine in stage.engines.values():
        engine.cancel()


@pytest.mark.parametrize(
    ("num_tokens", "step_s"), [(6000, 0.04), (3000, 0.05), (600, 4.0)], ids=["6000 tokens", "150 s", "slow steps"]
)
@pytest.mark.parametrize("paused_s", [0, 1000])
async def test_queued_requests_are_not_stalled_while_the_engine_steps(
    num_tokens: int, step_s: float, paused_s: float
) -> None:
    """Twice as many requests as the engines run at a time. Each takes minutes on its own."""
    async with staged(num_tokens, step_s) as stage:
        began = now()
        requests = [stage.ask(str(index)) for index in range(GROUP_SIZE * NUM_SLOTS)]
        if paused_s:
            await asyncio.sleep(100)
            await stage.router.pause("keep")
            await asyncio.sleep(paused_s)
            await stage.router.resume()
        completions = await asyncio.gather(*requests)
        assert now() - began - paused_s > 1.9 * num_tokens * step_s
        assert stage.failed == []
        assert {(len(c.token_ids), c.finish_reason) for c in completions} == {(num_tokens, FinishReason.STOP)}
        assert stage.num_computed == len(requests) * num_tokens


@pytest.mark.parametrize("paused_s", [0, 1000])
async def test_hanging_engine_is_detected_and_its_requests_move(paused_s: float) -> None:
    async with staged(num_tokens=6000, step_s=0.04) as stage:
        requests = [stage.ask(str(index)) for index in range(GROUP_SIZE * NUM_SLOTS)]
        await asyncio.sleep(100)
        stage.hang("a")
        if paused_s:
            await asyncio.sleep(200)
            pausing = asyncio.create_task(stage.router.pause("keep"))
            await asyncio.sleep(paused_s)
            await pausing
            assert stage.failed == []
            await stage.router.resume()
            await asyncio.sleep(99)
        else:
            await asyncio.sleep(299)
        assert stage.failed == []  # 299 s of its own time
        await asyncio.sleep(3)
        ((name, error),) = stage.failed
        assert name == "a"
        assert isinstance(error, EngineStalledError)
        assert str(error) == "no sign of life from a for 300 s"
        completions = await asyncio.gather(*requests)
        assert {(len(c.token_ids), c.finish_reason) for c in completions} == {(6000, FinishReason.STOP)}
        again = stage.num_computed - len(requests) * 6000
        assert 0 <= again <= MAX_RUNNING * STREAM_INTERVAL  # the tokens of a chunk that was not sent
        assert Counter(replica.serving for replica in stage.router.replicas) == {True: 1, False: 1}
        assert len(stage.failed) == 1


async def test_completions_of_a_non_streaming_replica_are_signs_of_life() -> None:
    a = FakeReplica("a")
    failed: list[Exception] = []
    limits = Limits(no_replica_s=50)
    router = GeneratorRouter(
        [a], stall_timeout_s=20, max_attempts=1, limits=limits, on_replica_failed=lambda _, error: failed.append(error)
    )

    def ask(request_id: str, tokens: int) -> asyncio.Task[Completion]:
        return asyncio.create_task(
            router.generate([1], request_id=request_id, sampling=SamplingParams(max_tokens=tokens))
        )

    long, short = ask("long", 85), [ask(str(index), 15 * index) for index in range(1, 6)]
    longest = ask("longest", 1000)
    assert len((await long).token_ids) == 85
    assert [len((await request).token_ids) for request in short] == [15, 30, 45, 60, 75]
    assert failed == []
    with pytest.raises(GenerationError, match="no sign of life from a for 20 s"):
        await longest
    assert now() == pytest.approx(105, abs=1)
    await router.close()


async def test_steps_without_tokens_are_signs_of_life() -> None:
    """Long prompts are computed in parts, so the engine steps without generating tokens."""

    class Prefills(FakeReplica):
        stepping = True

        async def stream(self, request, on_chunk) -> Completion:
            while self.stepping:
                await asyncio.sleep(5)
                on_chunk(TokenChunk(request.request_id, [], [], ()))
            await asyncio.sleep(1000)
            raise AssertionError("the request has moved by then")

    a, b = Prefills("a"), FakeReplica("b")
    router = GeneratorRouter([a, b], stall_timeout_s=20)
    request = asyncio.create_task(router.generate([1], request_id="1", sampling=SamplingParams(max_tokens=3)))
    await asyncio.sleep(1000)
    assert not request.done()
    a.stepping = False
    await asyncio.sleep(24)
    assert len((await request).token_ids) == 3
    assert b.served == ["1~1"]
    assert a.aborts == [["1"]]
    await router.close()


def watched(limit_s: float, on_failed: OnReplicaFailed) -> tuple[RequestsInFlight, PooledReplica]:
    """Requests under the watchdog, and a replica that serves again a moment after each stall."""
    limits = Limits(quarantine_s=1e-4, max_quarantine_s=1e-4)
    pool = Pool([FakeReplica("a")], RoundRobin(), limits, BackgroundTasks(OpenCalls()), on_failed, 1)
    return RequestsInFlight(pool, limit_s), pool.find("a")


@contextmanager
def on(replica: PooledReplica, requests: RequestsInFlight, request_id: str) -> Iterator[None]:
    """Run a request on `replica` within the block."""
    with requests.track(EngineRequest(request_id, [1], SamplingParams(max_tokens=1)), None) as request:
        request.assign(replica)
        yield
        request.unassign()


MOVES = st.lists(
    st.tuples(st.sampled_from(["hear", "freeze", "thaw", "ask", "answer"]), st.integers(0, 12)), max_size=30
)
LIMIT_S = 10.03  # never ends at the time of a move


@given(MOVES)
@settings(max_examples=examples(200), deadline=None)
def test_stall_is_reported_exactly_after_the_limit(moves: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        reported, expected = list[float](), list[float]()
        requests, replica = watched(LIMIT_S, lambda replica, error: reported.append(now()))
        waiting: list[AbstractContextManager[None]] = []
        frozen, silent_s = False, 0.0  # seconds in which requests waited and nothing was frozen
        for move, seconds in moves:
            if move == "hear":
                replica.note_alive()
                silent_s = 0.0
            elif move == "freeze":
                requests.freeze(1e6)
                frozen = True
            elif move == "thaw":
                requests.thaw()
                frozen = False
            elif move == "ask":
                silent_s = silent_s if waiting else 0.0
                waiting.append(on(replica, requests, str(len(waiting))))
                waiting[-1].__enter__()
            elif waiting:
                waiting.pop().__exit__(None, None, None)
            before_s, began = silent_s, now()
            if waiting and not frozen:
                silent_s = (before_s + seconds) % LIMIT_S
                if before_s + seconds > LIMIT_S:
                    expected.append(began + LIMIT_S - before_s)
                if before_s + seconds > 2 * LIMIT_S:
                    expected.append(began + 2 * LIMIT_S - before_s)
            await asyncio.sleep(seconds)
        assert reported == pytest.approx(expected, abs=0.01)

    in_virtual_time(scenario())


@pytest.mark.looptime(False)
async def test_blocked_event_loop_is_not_mistaken_for_a_stall() -> None:
    """Messages that arrived during the block are read some iterations of the loop after timers that are due."""
    loop, stalled = asyncio.get_running_loop(), asyncio.Event()
    requests, replica = watched(0.2, lambda replica, error: stalled.set())
    with on(replica, requests, "1"):
        await asyncio.sleep(0)
        arrives: Callable[[], object] = replica.note_alive
        for _ in range(5):
            arrives = partial(loop.call_soon, arrives)
        loop.call_soon_threadsafe(arrives)
        time.sleep(0.3)  # noqa: ASYNC251 - like a faulty environment
        await asyncio.sleep(0.1)
        assert not stalled.is_set()
        await asyncio.wait_for(stalled.wait(), 5)


def test_zero_stall_timeout_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"stall_timeout_s is 0; it must be above 0"):
        GeneratorRouter([], stall_timeout_s=0)
