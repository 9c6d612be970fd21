"""Guarantees of the engine loop, tested with the scripted engine."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

import pytest
from background import HANG_S

from titan_rl.core.errors import EngineDeadError, GenerationError, RequestError, StateDictError, VerificationError
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.scripted_engine import ScriptedEngine, scripted_logprobs
from titan_rl.generation.types import KVPolicy, PauseMode
from titan_rl.testing.clock import ManualClock, StepClock
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, TokenChunk, VersionSpan

WEIGHTS = [("w", 1)]


@asynccontextmanager
async def serving(engine: ScriptedEngine, **settings: object) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(lambda: engine, **settings)  # type: ignore[arg-type]
    await loop.start()
    try:
        async with asyncio.timeout(HANG_S):
            yield loop
    finally:
        engine.release.set()
        await loop.close()
    assert engine.closed


def request(loop: EngineLoop, name: str, max_tokens: int = 8, **settings: object) -> asyncio.Task[Completion]:
    sampling = SamplingParams(max_tokens=max_tokens, **settings)  # type: ignore[arg-type]
    return asyncio.create_task(loop.generate([1, 2, len(name)], request_id=name, sampling=sampling))


async def undisturbed(prompt: list[int], max_tokens: int) -> Completion:
    async with serving(ScriptedEngine()) as loop:
        return await loop.generate(prompt, request_id="-", sampling=SamplingParams(max_tokens=max_tokens))


async def blocked(engine: ScriptedEngine) -> None:
    """Return while the engine is inside the step that blocks."""
    assert await asyncio.to_thread(engine.started.wait, 10)


def test_generate_conforms_to_generate_fn() -> None:
    generate: GenerateFn = EngineLoop(ScriptedEngine).generate
    assert isinstance(generate, GenerateFn)


async def test_concurrent_requests_share_one_batch() -> None:
    engine = ScriptedEngine(block_at_step=1)
    async with serving(engine) as loop:
        first = request(loop, "first", 10)
        await blocked(engine)
        calls = [request(loop, f"r{index}", 10) for index in range(20)]
        await asyncio.sleep(0)
        engine.release.set()
        completions = await asyncio.gather(first, *calls)
    assert all(len(completion.token_ids) == 10 for completion in completions)
    assert engine.num_steps == 11  # ten together, one step after the first
    assert completions[1].metrics["requests_in_flight"] == 21
    assert {"queue_s", "time_to_first_token_s", "inter_token_s", "cached_prompt_tokens"} <= set(completions[1].metrics)


async def test_hot_swap_keeps_tokens_and_records_their_versions() -> None:
    engine = ScriptedEngine(block_at_step=3)
    async with serving(engine) as loop:
        call = request(loop, "a", 8)
        await blocked(engine)
        pull = asyncio.create_task(loop.pull(5, lambda: WEIGHTS))
        await until(lambda: loop._state._pulls)
        engine.release.set()
        completion, result = await call, await pull
        assert loop.version == 5
    assert result.version == 5
    assert result.stall_s >= result.load_s >= 0
    assert completion.version_spans == (VersionSpan(0, 3), VersionSpan(5, 5))
    assert list(completion.token_ids) == list((await undisturbed([1, 2, 1], 8)).token_ids)
    sequence = [1, 2, 1, *completion.token_ids]
    expected = scripted_logprobs(sequence, 0)[2:5] + scripted_logprobs(sequence, 5)[5:]
    assert list(completion.logprobs) == expected


async def until(condition: Callable[[], object]) -> None:
    """Return once a call made in another task has reached the loop."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_pending_pulls_load_only_the_newest_version() -> None:
    engine = ScriptedEngine(block_at_step=1)
    async with serving(engine) as loop:
        call = request(loop, "a")
        await blocked(engine)
        pulls = [asyncio.create_task(loop.pull(version, lambda: WEIGHTS)) for version in (1, 3, 2)]
        await until(lambda: len(loop._state._pulls) == 3)
        engine.release.set()
        assert [(await pull).version for pull in pulls] == [3, 3, 3]
        await call
    assert engine.versions == [0, 3]


async def test_late_pull_does_not_restore_older_weights() -> None:
    engine, opening, go = ScriptedEngine(), threading.Event(), threading.Event()

    def slow() -> list[tuple[str, int]]:
        opening.set()
        assert go.wait(10)
        return WEIGHTS

    async with serving(engine) as loop:
        late = asyncio.create_task(loop.pull(6, slow))
        assert await asyncio.to_thread(opening.wait, 10)
        assert (await loop.pull(7, lambda: WEIGHTS)).version == 7
        go.set()
        assert (await late).version == 7
        assert (await loop.pull(5, unwanted)).version == 7
        assert loop.version == 7
        assert (await request(loop, "a")).version_spans == (VersionSpan(7, 8),)
        assert (await loop.pull(7, lambda: WEIGHTS)).version == 7
    assert engine.versions == [0, 7, 7]


def unwanted() -> list[tuple[str, int]]:
    raise AssertionError("weights that must not be loaded were opened")


async def test_pull_during_verification_of_a_newer_version_returns_the_newer() -> None:
    engine, verifying, go = ScriptedEngine(), threading.Event(), threading.Event()

    def verify(loaded: object) -> None:
        verifying.set()
        assert go.wait(10)

    async with serving(engine) as loop:
        newer = asyncio.create_task(loop.pull(7, lambda: WEIGHTS, verify))
        assert await asyncio.to_thread(verifying.wait, 10)
        late = asyncio.create_task(loop.pull(6, lambda: WEIGHTS))
        await until(lambda: len(loop._state._pulls) == 2)
        go.set()
        assert [(await newer).version, (await late).version] == [7, 7]
    assert engine.versions == [0, 7]


async def test_failed_verification_is_not_repaired_by_an_older_version() -> None:
    def reject(loaded: object) -> None:
        raise VerificationError("logprobs differ by 3.2")

    async with serving(ScriptedEngine()) as loop:
        await loop.pull(7, lambda: WEIGHTS)
        with pytest.raises(VerificationError):
            await loop.pull(8, lambda: WEIGHTS, reject)
        assert loop.version == 7
        with pytest.raises(StateDictError, match=r"version 6 is older than version 7.*pull version 7 or a newer one"):
            await loop.pull(6, unwanted)
        await loop.pull(7, lambda: WEIGHTS)
        assert (await request(loop, "a")).version_spans == (VersionSpan(7, 8),)


async def test_bad_request_fails_alone() -> None:
    engine = ScriptedEngine(max_context=16, block_at_step=1)
    async with serving(engine) as loop:
        good = request(loop, "good")
        await blocked(engine)
        with pytest.raises(RequestError, match="'good' is already in flight"):
            await request(loop, "good")
        too_long = asyncio.create_task(
            loop.generate([1] * 16, request_id="long", sampling=SamplingParams(max_tokens=1))
        )
        await asyncio.sleep(0)
        engine.release.set()
        with pytest.raises(RequestError, match="16 prompt tokens"):
            await too_long
        assert len((await good).token_ids) == 8


class Faulty(ScriptedEngine):
    """Engine that applies `fault` to the tokens of request "bad", or raises it when the request is added."""

    def __init__(self, fault: Callable[[TokenDelta], TokenDelta] | BaseException) -> None:
        super().__init__()
        self._fault = fault

    def add(self, request: EngineRequest) -> None:
        if request.request_id == "bad" and isinstance(self._fault, BaseException):
            raise self._fault
        super().add(request)

    def step(self) -> list[TokenDelta]:
        deltas = super().step()
        if isinstance(self._fault, BaseException) or self.num_steps < 3:
            return deltas
        return [self._fault(delta) if delta.request_id == "bad" else delta for delta in deltas]


@pytest.mark.parametrize(
    "error",
    [KeyError("seed"), StopIteration(), MemoryError(), BaseException("panic"), SystemExit(2), asyncio.CancelledError()],
)
async def test_unexpected_error_when_adding_a_request_fails_only_that_request(error: BaseException) -> None:
    async with serving(Faulty(error)) as loop:
        good = request(loop, "good")
        with pytest.raises(RequestError, match=f"'bad' was not accepted: {type(error).__name__}") as failure:
            await request(loop, "bad")
        assert failure.value.__cause__ is error
        assert len((await good).token_ids) == 8
        assert len((await request(loop, "later")).token_ids) == 8


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda delta: replace(delta, finish_reason="repetition"), "'bad' was ended by the engine with 'repetition'"),
        (lambda delta: replace(delta, failure="its KV was lost"), "'bad' was abandoned by the engine: its KV was lost"),
        (lambda delta: replace(delta, logprobs=()), "'bad' got 1 tokens with 0 logprobs"),
    ],
    ids=["reason", "failure", "logprobs"],
)
async def test_request_that_the_engine_cannot_finish_fails_alone(
    fault: Callable[[TokenDelta], TokenDelta], message: str
) -> None:
    engine = Faulty(fault)
    async with serving(engine) as loop:
        good = request(loop, "good", 20)
        with pytest.raises(GenerationError, match=message):
            await request(loop, "bad", 20)
        assert len((await good).token_ids) == 20
        assert not engine.step()
        assert len((await request(loop, "later")).token_ids) == 8


async def test_engine_failure_fails_every_call_with_its_cause() -> None:
    engine = ScriptedEngine(fail_at_step=3)
    loop = EngineLoop(lambda: engine)
    await loop.start()
    outcomes = await asyncio.gather(*(request(loop, f"r{i}") for i in range(5)), return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, EngineDeadError)
        assert "injected failure" in str(outcome.__cause__)
    for late in (request(loop, "late"), loop.pull(1, lambda: WEIGHTS), loop.pause("keep")):
        with pytest.raises(EngineDeadError, match="injected"):
            await late
    await loop.abort()
    await loop.close()
    assert engine.closed


async def test_engine_construction_error_is_reported() -> None:
    def make_engine() -> ScriptedEngine:
        raise OSError("no such model")

    loop = EngineLoop(make_engine)
    with pytest.raises(EngineDeadError, match="no such model") as failure:
        await loop.start()
    assert isinstance(failure.value.__cause__, OSError)
    await loop.close()


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "engine-loop"}


async def test_close_resolves_every_pending_call() -> None:
    engine = ScriptedEngine(block_at_step=1)
    before = engine_threads()
    loop = EngineLoop(lambda: engine)
    await loop.start()
    assert len(engine_threads() - before) == 1
    calls = [request(loop, f"r{i}") for i in range(3)]
    await blocked(engine)
    calls.append(request(loop, "queued"))
    pull = asyncio.create_task(loop.pull(1, lambda: WEIGHTS))
    pause = asyncio.create_task(loop.pause("wait"))
    await until(lambda: loop._state._pulls)
    closing = asyncio.create_task(loop.close())
    await until(lambda: loop._state._closing)
    engine.release.set()
    outcomes = await asyncio.gather(*calls, pull, pause, return_exceptions=True)
    assert all(isinstance(outcome, EngineDeadError) for outcome in outcomes)
    await closing
    await loop.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await request(loop, "late")
    assert engine_threads() <= before


async def test_close_does_not_wait_for_a_stuck_engine() -> None:
    engine = ScriptedEngine(block_at_step=1)
    loop = EngineLoop(lambda: engine)
    await loop.start()
    call = request(loop, "a")
    await blocked(engine)
    await loop.close(timeout_s=0.01)
    with pytest.raises(EngineDeadError):
        await call
    engine.release.set()


async def test_cancelling_a_caller_frees_its_request() -> None:
    engine = ScriptedEngine(block_at_step=2)
    async with serving(engine) as loop:
        call = request(loop, "a", 1000)
        await blocked(engine)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        again = request(loop, "a", 4)  # the id is free at once
        await asyncio.sleep(0)
        engine.release.set()
        assert len((await again).token_ids) == 4
        assert loop.num_in_flight == 0
        assert not engine.step()


async def test_abort_returns_the_partial_completion() -> None:
    engine = ScriptedEngine(block_at_step=3)
    async with serving(engine) as loop:
        running = request(loop, "running", 100)
        other = request(loop, "other", 10)
        await blocked(engine)
        queued = request(loop, "queued", 100)
        await asyncio.sleep(0)
        aborting = asyncio.create_task(loop.abort(["running", "queued", "unknown"]))
        assert (await queued).finish_reason is FinishReason.ABORT
        assert not (await queued).token_ids
        engine.release.set()
        await aborting
        aborted = await running
        assert aborted.finish_reason is FinishReason.ABORT
        assert list(aborted.token_ids) == list((await undisturbed([1, 2, 7], 3)).token_ids)
        assert (await other).finish_reason is FinishReason.LENGTH
        await loop.abort(["other"])


async def test_completion_finished_during_an_abort_is_marked_aborted() -> None:
    engine = ScriptedEngine(block_at_step=2)
    async with serving(engine) as loop:
        call = request(loop, "a", 2)
        await blocked(engine)  # inside the step that finishes it
        pause = asyncio.create_task(loop.pause("abort"))
        await asyncio.sleep(0)
        engine.release.set()
        await pause
        completion = await call
        assert completion.finish_reason is FinishReason.ABORT
        assert len(completion.token_ids) == 2
        steps = engine.num_steps
        assert (await request(loop, "late")).finish_reason is FinishReason.ABORT
        assert engine.num_steps == steps


async def test_pause_keep_freezes_requests_and_allows_pulls() -> None:
    engine = ScriptedEngine(block_at_step=2)
    async with serving(engine) as loop:
        call = request(loop, "a", 6)
        await blocked(engine)
        pause = asyncio.create_task(loop.pause(PauseMode.KEEP))
        await asyncio.sleep(0)
        engine.release.set()
        await pause
        late = request(loop, "late", 6)
        await loop.pull(1, lambda: WEIGHTS)
        assert engine.num_steps == 2
        assert loop.paused is PauseMode.KEEP
        with pytest.raises(RuntimeError, match="already paused"):
            await loop.pause("keep")
        await loop.resume()
        with pytest.raises(RuntimeError, match="not paused"):
            await loop.resume()
        assert (await call).version_spans == (VersionSpan(0, 2), VersionSpan(1, 4))
        assert (await late).version_spans == (VersionSpan(1, 6),)


async def test_set_paused_is_idempotent() -> None:
    engine = ScriptedEngine(block_at_step=2)
    async with serving(engine) as loop:
        call = request(loop, "a", 6)
        await blocked(engine)
        keep = [asyncio.create_task(loop.set_paused(PauseMode.KEEP)) for _ in range(2)]
        await asyncio.sleep(0)
        engine.release.set()
        await asyncio.gather(*keep)
        assert loop.paused is PauseMode.KEEP
        await loop.set_paused(PauseMode.ABORT)
        assert (await call).finish_reason is FinishReason.ABORT
        for _ in range(2):
            await loop.set_paused(None)
        assert loop.paused is None
        assert len((await request(loop, "b")).token_ids) == 8


async def test_unknown_pause_mode_is_rejected() -> None:
    async with serving(ScriptedEngine()) as loop:
        with pytest.raises(ValueError, match="pause mode is 'rest'; it must be one of keep, abort, wait, sleep"):
            await loop.pause("rest")
        assert loop.paused is None


async def test_pause_wait_lets_running_requests_finish_and_holds_new_ones() -> None:
    engine = ScriptedEngine(block_at_step=2)
    async with serving(engine) as loop:
        call = request(loop, "a", 6)
        await blocked(engine)
        pause = asyncio.create_task(loop.pause("wait"))
        await asyncio.sleep(0)
        late = request(loop, "late", 6)
        engine.release.set()
        await pause
        assert (await call).finish_reason is FinishReason.LENGTH
        assert engine.num_steps == 6
        await loop.resume()
        assert len((await late).token_ids) == 6


async def test_pause_wait_aborts_requests_at_its_timeout(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(max_context=10**9, block_at_step=1)
    async with serving(engine) as loop:
        call = request(loop, "a", 10**9)
        await blocked(engine)
        engine.release.set()
        await loop.pause("wait", timeout_s=0.01)
        assert (await call).finish_reason is FinishReason.ABORT
    assert "aborts 1 requests" in caplog.text


async def test_abort_does_not_wait_for_a_stuck_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(block_at_step=3)
    async with serving(engine) as loop:
        call = request(loop, "a", 10)
        await blocked(engine)
        await loop.abort(timeout_s=0.01)
        assert len((await call).token_ids) == 2
        engine.release.set()
        assert len((await request(loop, "a", 4)).token_ids) == 4
    assert "abandoned 1 requests" in caplog.text


async def test_unverified_weights_are_not_served() -> None:
    def reject(engine: object) -> None:
        raise VerificationError("logprobs differ by 3.2")

    engine = ScriptedEngine(block_at_step=2)
    async with serving(engine, kv_policy=KVPolicy(reset_prefix_cache=False)) as loop:
        call = request(loop, "a", 6)
        await blocked(engine)
        pull = asyncio.create_task(loop.pull(1, lambda: WEIGHTS, reject))
        await until(lambda: loop._state._pulls)
        engine.release.set()
        with pytest.raises(VerificationError, match=r"3\.2"):
            await pull
        for refused in (call, request(loop, "b")):
            with pytest.raises(GenerationError, match=r"differ by 3\.2.*pull again") as failure:
                await refused
            assert isinstance(failure.value.__cause__, VerificationError)
        assert not engine.step()
        await loop.pull(2, lambda: WEIGHTS, lambda engine: None)
        assert (await request(loop, "c")).version_spans == (VersionSpan(2, 8),)


async def test_missing_version_leaves_the_old_weights_serving() -> None:
    def gone() -> list[tuple[str, int]]:
        raise StateDictError("version 7 is gone")

    def empty_then_gone():
        raise StateDictError("version 7 is gone")
        yield

    async with serving(ScriptedEngine()) as loop:
        for make_items in (gone, empty_then_gone):
            with pytest.raises(StateDictError, match="gone"):
                await loop.pull(7, make_items)
        assert (await request(loop, "a")).version_spans == (VersionSpan(0, 8),)


@pytest.mark.parametrize(
    "error",
    [StopIteration("no more"), OSError("no route"), BaseException("panic"), SystemExit(2), asyncio.CancelledError()],
)
async def test_error_opening_weights_is_raised_by_pull(error: BaseException) -> None:
    def make_items() -> list[tuple[str, int]]:
        raise error

    async with serving(ScriptedEngine()) as loop:
        async with asyncio.timeout(HANG_S):
            with pytest.raises(
                StateDictError, match=f"version 7 could not be opened: {type(error).__name__}"
            ) as failure:
                await loop.pull(7, make_items)
        assert failure.value.__cause__ is error
        assert (await request(loop, "a")).version_spans == (VersionSpan(0, 8),)


@pytest.mark.parametrize("kind", [OSError, BaseException, asyncio.CancelledError])
async def test_partially_loaded_weights_are_not_served(kind: type[BaseException]) -> None:
    def half():
        yield "w", 1
        raise kind("connection lost")

    async with serving(ScriptedEngine()) as loop:
        with pytest.raises(StateDictError, match="connection lost"):
            await loop.pull(1, half)
        with pytest.raises(GenerationError, match="connection lost"):
            await request(loop, "a")
        await loop.pull(1, lambda: WEIGHTS)
        await request(loop, "a")


class Source:
    """Weights whose `close` fails."""

    def __init__(self, error: BaseException) -> None:
        self._pairs = iter(WEIGHTS)
        self._error = error

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, int]:
        return next(self._pairs)

    def close(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [OSError("gone"), BaseException("panic"), SystemExit(2), asyncio.CancelledError()])
async def test_weight_source_close_error_is_logged_and_ignored(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    is_loaded = threading.Event()

    def open_late() -> Source:
        assert is_loaded.wait(10)
        return Source(error)

    engine = ScriptedEngine(block_at_step=2)
    async with serving(engine) as loop:
        running = request(loop, "a")
        await blocked(engine)
        late = asyncio.create_task(loop.pull(1, open_late))
        pulls = [asyncio.create_task(loop.pull(version, lambda: Source(error))) for version in (1, 2)]
        await until(lambda: len(loop._state._pulls) == 2)
        engine.release.set()
        assert [pulled.version for pulled in await asyncio.gather(*pulls)] == [2, 2]
        is_loaded.set()
        assert (await late).version == 2
        await running
        assert (await request(loop, "b")).version_spans == (VersionSpan(2, 8),)
    logged = [record for record in caplog.records if "failed to close" in record.message]
    assert sorted(record.message[:23] for record in logged) == ["the source of version 1"] * 2 + [
        "the source of version 2"
    ]
    assert all(record.exc_info and record.exc_info[1] is error for record in logged)


async def test_pull_resets_the_prefix_cache() -> None:
    prompt = list(range(64))

    async def cached(loop: EngineLoop, name: str) -> float:
        completion = await loop.generate(prompt, request_id=name, sampling=SamplingParams(max_tokens=1))
        return completion.metrics["cached_prompt_tokens"]

    async with serving(ScriptedEngine()) as loop:
        assert [await cached(loop, "a"), await cached(loop, "b")] == [0, 64]
        await loop.pull(1, lambda: WEIGHTS)
        assert await cached(loop, "c") == 0
    async with serving(ScriptedEngine(), kv_policy=KVPolicy(reset_prefix_cache=False)) as loop:
        await cached(loop, "a")
        await loop.pull(1, lambda: WEIGHTS)
        assert await cached(loop, "c") == 64


def test_invalid_kv_policy_is_rejected() -> None:
    with pytest.raises(ValueError, match="reset_prefix_cache=True"):
        KVPolicy(running="recompute", reset_prefix_cache=False)


async def test_tokens_are_streamed_at_an_interval() -> None:
    chunks: list[TokenChunk] = []
    async with serving(ScriptedEngine(), stream_interval=4) as loop:
        whole = await loop.stream(EngineRequest("a", [1], SamplingParams(max_tokens=10)), chunks.append)
    assert [len(chunk.token_ids) for chunk in chunks] == [4, 4]
    assert [*chunks[0].token_ids, *chunks[1].token_ids] == list(whole.token_ids)[:8]
    assert chunks[1].version_spans == (VersionSpan(0, 4),)


async def test_steps_without_tokens_send_empty_chunks_to_every_request() -> None:
    """A long prompt takes five steps without a token, and the second request waits until the first has finished."""
    clock = ManualClock()

    class Prefills(ScriptedEngine):
        def step(self) -> list[TokenDelta]:
            clock.seconds += 0.6
            self.num_prefills = getattr(self, "num_prefills", 0) + 1
            return [] if self.num_prefills <= 5 else super().step()

    engine = Prefills(max_running=1)
    loop = EngineLoop(lambda: engine, stream_interval=1000, clock=clock)
    await loop.start()
    chunks_of: dict[str, list[list[int]]] = {"a": [], "b": []}

    async def ask(name: str) -> Completion:
        def on_chunk(chunk: TokenChunk) -> None:
            chunks_of[name].append(list(chunk.token_ids))

        return await loop.stream(EngineRequest(name, [1], SamplingParams(max_tokens=8)), on_chunk)

    whole, second = await asyncio.gather(ask("a"), ask("b"))
    await loop.close()
    assert chunks_of["a"][:2] == [[], []]  # after two and four steps
    streamed = [token for tokens in chunks_of["a"] for token in tokens]
    assert streamed == list(whole.token_ids)[: len(streamed)]
    assert len(streamed) >= 6
    assert chunks_of["b"][:6] == [[]] * 6
    assert len(second.token_ids) == 8


async def test_queue_time_excludes_prefill_and_covers_requests_that_never_ran() -> None:
    """The engine runs one request at a time, and computes a prompt in five steps."""

    class Prefills(ScriptedEngine):
        def step(self) -> list[TokenDelta]:
            if self.num_steps < 5:
                self.num_steps += 1
                return [TokenDelta("a", (), ())]
            return super().step()

    engine = Prefills(max_running=1, block_at_step=8)
    async with serving(engine, clock=StepClock(engine)) as loop:
        await loop.pause("keep")
        running, queued = request(loop, "a"), request(loop, "b")
        await asyncio.sleep(0)
        await loop.resume()
        await blocked(engine)
        abort = asyncio.create_task(loop.abort(["b"]))
        await asyncio.sleep(0)
        engine.release.set()
        await abort
        metrics = (await running).metrics
        assert (metrics["queue_s"], metrics["time_to_first_token_s"]) == (0.0, 6.0)
        assert (await queued).finish_reason is FinishReason.ABORT
        assert (await queued).metrics["queue_s"] == 8.0


async def test_several_event_loops_share_the_engine() -> None:
    async with serving(ScriptedEngine()) as loop:

        def in_another_loop() -> Completion:
            return asyncio.run(loop.generate([1, 2, 1], request_id="b", sampling=SamplingParams(max_tokens=8)))

        there, here = await asyncio.gather(asyncio.to_thread(in_another_loop), request(loop, "a"))
    assert there.token_ids == here.token_ids


async def test_generate_before_start_is_an_error() -> None:
    loop = EngineLoop(ScriptedEngine)
    with pytest.raises(RuntimeError, match="start"):
        await request(loop, "a")
    await loop.close()


async def test_pull_and_close_do_not_use_the_default_executor() -> None:
    users, release = ThreadPoolExecutor(1), threading.Event()
    asyncio.get_running_loop().set_default_executor(users)
    hanging = asyncio.ensure_future(asyncio.to_thread(release.wait))
    try:
        async with serving(ScriptedEngine()) as loop:
            assert (await loop.pull(1, lambda: WEIGHTS)).version == 1
        assert not hanging.done()
    finally:
        release.set()
        await hanging
