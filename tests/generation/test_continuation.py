"""Aborts are invisible behind `resume_on_abort`."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from titan_rl.core.errors import GenerationError
from titan_rl.generation.continuation import resume_on_abort
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, VersionSpan

ABORT, STOP, LENGTH, TOOL_CALLS = FinishReason.ABORT, FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS


class Parts:
    """`GenerateFn` that returns prepared parts and records its requests."""

    def __init__(self, *parts: tuple[list[int], FinishReason], experts: bool = False) -> None:
        self.parts = list(parts)
        self.experts = experts
        self.late: tuple[FinishReason, ...] = ()  # finish reasons that an abort came too late to prevent
        self.prompts: list[list[int]] = []
        self.samplings: list[SamplingParams] = []

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        self.prompts.append(list(prompt_token_ids))
        self.samplings.append(sampling)
        version = len(self.prompts)
        token_ids, finish_reason = self.parts.pop(0)
        late = finish_reason in self.late
        return Completion(
            request_id,
            token_ids,
            [-float(token) for token in token_ids],
            ABORT if late else finish_reason,
            (VersionSpan(version, len(token_ids)),) if token_ids else (),
            [[[token]] for token in token_ids] if self.experts else None,
            {"queue_s": 1.0, "time_to_first_token_s": float(version), "inter_token_s": float(version)},
            finish_reason if late else None,
        )


async def resumed(parts: Parts, sampling: SamplingParams, **settings: object) -> Completion:
    generate: GenerateFn = resume_on_abort(parts, **settings)  # type: ignore[arg-type]
    return await generate([7, 8], request_id="a", session_id="s", sampling=sampling)


async def test_aborted_parts_are_joined_into_one_completion() -> None:
    parts = Parts(([1, 2], ABORT), ([3], ABORT), ([4, 5], STOP), experts=True)
    sampling = SamplingParams(max_tokens=10, min_tokens=3, seed=5, stop_token_ids=(5,), return_routed_experts=True)
    whole = await resumed(parts, sampling)
    assert whole.token_ids == [1, 2, 3, 4, 5]
    assert whole.logprobs == [-1, -2, -3, -4, -5]
    assert whole.finish_reason is STOP
    assert whole.version_spans == (VersionSpan(1, 2), VersionSpan(2, 1), VersionSpan(3, 2))
    assert whole.routed_experts == [[[1]], [[2]], [[3]], [[4]], [[5]]]
    assert parts.prompts == [[7, 8], [7, 8, 1, 2], [7, 8, 1, 2, 3]]
    assert [params.max_tokens for params in parts.samplings] == [10, 8, 7]
    assert [params.min_tokens for params in parts.samplings] == [3, 1, 0]
    assert len({params.seed for params in parts.samplings}) == 3
    assert parts.samplings[0] is sampling
    assert whole.metrics["queue_s"] == 3
    assert whole.metrics["time_to_first_token_s"] == 1
    assert whole.metrics["inter_token_s"] == pytest.approx((2 * 1 + 1 * 2 + 2 * 3) / 5)
    assert whole.metrics["num_resumes"] == 2


async def test_unaborted_completion_is_returned_unchanged() -> None:
    completion = Completion("a", [1], [0.0], LENGTH, (VersionSpan(0, 1),))

    async def generate(prompt_token_ids: Sequence[int], **request: object) -> Completion:
        return completion

    sampling = SamplingParams(max_tokens=1)
    assert await resume_on_abort(generate)([1], request_id="a", sampling=sampling) is completion


async def test_abort_without_tokens_resends_the_original_request() -> None:
    parts = Parts(([], ABORT), ([1], LENGTH))
    sampling = SamplingParams(max_tokens=1, seed=3)
    assert (await resumed(parts, sampling)).token_ids == [1]
    assert parts.prompts == [[7, 8], [7, 8]]
    assert parts.samplings == [sampling, sampling]


@pytest.mark.parametrize(
    ("partial", "sampling", "ending"),
    [
        ([1, 2, 3], SamplingParams(max_tokens=3), LENGTH),
        ([1, 9], SamplingParams(max_tokens=3, stop_token_ids=(9,)), STOP),
        ([1, 2, 9], SamplingParams(max_tokens=3, stop_token_ids=(9,)), STOP),
    ],
)
async def test_aborted_request_that_had_ended_is_not_resent(
    partial: list[int], sampling: SamplingParams, ending: FinishReason
) -> None:
    parts = Parts((partial, ABORT))
    whole = await resumed(parts, sampling)
    assert (whole.token_ids, whole.finish_reason) == (partial, ending)


@pytest.mark.parametrize("ending", [TOOL_CALLS, STOP, LENGTH])
async def test_request_that_ended_during_its_abort_is_not_resent(ending: FinishReason) -> None:
    """A tool call, or a stop token that only the engine knows, cannot be recognized from the tokens."""
    parts = Parts(([1], ABORT), ([2, 3], ending))
    parts.late = (ending,)
    whole = await resumed(parts, SamplingParams(max_tokens=9))
    assert (whole.token_ids, whole.finish_reason, whole.ended) == ([1, 2, 3], ending, None)


async def test_engine_reports_the_ending_of_a_request_aborted_too_late() -> None:
    class CallsTools(ScriptedEngine):
        def step(self) -> list[TokenDelta]:
            return [replace(delta, finish_reason=TOOL_CALLS) for delta in super().step()]

    engine = CallsTools(block_at_step=1)
    loop = EngineLoop(lambda: engine)
    await loop.start()
    request = asyncio.create_task(loop.generate([1], request_id="a", sampling=SamplingParams(max_tokens=9)))
    assert await asyncio.to_thread(engine.started.wait, 10)
    abort = asyncio.create_task(loop.abort(["a"]))
    await asyncio.sleep(0)
    engine.release.set()
    await abort
    completion = await request
    assert (completion.finish_reason, completion.ended, len(completion.token_ids)) == (ABORT, TOOL_CALLS, 1)
    await loop.close()


@pytest.mark.parametrize("max_context", [3, 4])
async def test_full_context_ends_with_length(max_context: int) -> None:
    whole = await resumed(Parts(([1, 2], ABORT)), SamplingParams(max_tokens=9), max_context=max_context)
    assert whole.finish_reason is LENGTH


async def test_exhausted_attempts_return_an_abort_with_the_tokens() -> None:
    parts = Parts(([1], ABORT), ([2], ABORT), ([3], ABORT))
    whole = await resumed(parts, SamplingParams(max_tokens=9), max_attempts=3)
    assert (whole.token_ids, whole.finish_reason) == ([1, 2, 3], ABORT)
    with pytest.raises(ValueError, match="max_attempts is 0"):
        resume_on_abort(parts, max_attempts=0)


@pytest.mark.parametrize("tokens", [[], [7]], ids=["in the queue", "after a token"])
@pytest.mark.looptime
async def test_number_of_interruptions_is_unlimited(tokens: list[int]) -> None:
    """Each interruption comes after some time: in the engine's queue, or between two tokens."""
    parts = Parts(*[(tokens, ABORT)] * 1000, ([1], STOP))

    async def generate(*args: object, **request: object) -> Completion:
        await asyncio.sleep(30)
        return await parts(*args, **request)  # type: ignore[arg-type]

    began = asyncio.get_running_loop().time()
    whole = await resume_on_abort(generate)([7], request_id="a", sampling=SamplingParams(max_tokens=9000))
    assert (whole.token_ids, whole.finish_reason) == (tokens * 1000 + [1], STOP)
    assert asyncio.get_running_loop().time() - began == pytest.approx(30 * 1001, abs=1)


@pytest.mark.looptime
async def test_endless_immediate_aborts_do_not_busy_loop() -> None:
    parts = Parts(([1], ABORT), *[([], ABORT)] * 1000)
    whole = await resumed(parts, SamplingParams(max_tokens=9), resume_timeout_s=60.0)
    assert (whole.token_ids, whole.finish_reason) == ([1], ABORT)
    assert len(parts.prompts) < 100
    assert asyncio.get_running_loop().time() == pytest.approx(60, abs=2)
    assert whole.metrics["interrupted_s"] == pytest.approx(60, abs=2)


@pytest.mark.looptime
async def test_resume_waits_while_paused_up_to_its_timeout() -> None:
    waits = 0

    async def wait() -> None:
        nonlocal waits
        waits += 1

    await resumed(Parts(([1], ABORT), ([2], STOP)), SamplingParams(max_tokens=9), wait_until_resumed=wait)
    assert waits == 1
    never = asyncio.Event().wait
    whole = await resumed(
        Parts(([1], ABORT)), SamplingParams(max_tokens=9), wait_until_resumed=never, resume_timeout_s=30.0
    )
    assert (whole.token_ids, whole.finish_reason) == ([1], ABORT)
    assert whole.metrics["interrupted_s"] == pytest.approx(30)


async def test_missing_routed_experts_are_an_error() -> None:
    with pytest.raises(GenerationError, match="routed experts"):
        await resumed(Parts(([1], STOP)), SamplingParams(max_tokens=9, return_routed_experts=True))


async def test_tokens_are_unaffected_by_pauses_of_an_engine_loop() -> None:
    """Six requests, two at a time, with two cycles of pause and resume."""
    sampling = SamplingParams(max_tokens=2048)

    async def play(disturb: bool) -> list[Completion]:
        engine = ScriptedEngine(max_running=2, block_at_step=50, seed=1)
        if not disturb:
            engine.release.set()
        loop = EngineLoop(lambda: engine)
        await loop.start()
        running = asyncio.Event()
        running.set()
        generate = resume_on_abort(loop.generate, wait_until_resumed=running.wait)
        calls = [
            asyncio.create_task(generate([index], request_id=f"r{index}", sampling=sampling)) for index in range(6)
        ]
        if disturb:
            assert await asyncio.to_thread(engine.started.wait, 10)
            for _ in range(2):
                running.clear()
                pause = asyncio.create_task(loop.pause("abort"))
                await asyncio.sleep(0)
                engine.release.set()
                await pause
                await loop.resume()
                running.set()
                await asyncio.sleep(0.005)
        completions = await asyncio.gather(*calls)
        await loop.close()
        return completions

    undisturbed, disturbed = await play(False), await play(True)
    assert [c.token_ids for c in disturbed] == [list(c.token_ids) for c in undisturbed]
    assert all(len(c.logprobs) == 2048 and c.finish_reason is LENGTH for c in disturbed)
    assert sum(c.metrics.get("num_resumes", 0) for c in disturbed) >= 6


async def test_generate_cannot_modify_the_prompt_of_later_attempts() -> None:
    seen: list[list[int]] = []

    async def meddling(prompt_token_ids: Any, *, request_id: str, **kwargs: Any) -> Completion:
        seen.append(list(prompt_token_ids))
        prompt_token_ids.append(99)
        reason = FinishReason.STOP if len(seen) == 3 else FinishReason.ABORT
        return Completion(request_id, [1], [-0.1], reason, (VersionSpan(0, 1),))

    mine = [5]
    await resume_on_abort(meddling)(mine, request_id="r", sampling=SamplingParams(max_tokens=8))
    assert (mine, seen) == ([5], [[5], [5, 1], [5, 1, 1]])


async def test_generate_that_returns_none_is_named() -> None:
    async def nothing(*args: Any, **kwargs: Any) -> Any:
        return None

    with pytest.raises(TypeError, match="generate returned NoneType; it must return a Completion"):
        await resume_on_abort(nothing)([5], request_id="r", sampling=SamplingParams(max_tokens=8))


@pytest.mark.looptime
async def test_wait_that_ignores_cancellation_is_abandoned() -> None:
    over = False

    async def deaf() -> None:
        while not over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1e4)

    completion = await resumed(
        Parts(([1], ABORT)), SamplingParams(max_tokens=9), wait_until_resumed=deaf, resume_timeout_s=30.0
    )
    over = True
    assert completion.finish_reason is ABORT
    assert asyncio.get_running_loop().time() < 60
