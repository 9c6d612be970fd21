"""Aborts made invisible: a `GenerateFn` that goes on where an aborted completion ended."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from titan_rl.errors import GenerationError
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, VersionSpan


def resume_on_abort(
    generate: GenerateFn,
    *,
    wait_until_resumed: Callable[[], Awaitable[object]] | None = None,
    resume_timeout_s: float = 300.0,
    max_attempts: int = 64,
    max_context: int | None = None,
) -> GenerateFn:
    """Wrap `generate` so that its callers see whole completions.

    While a completion says ABORT, the prompt with the tokens so far is sent again with the budget that remains, under
    the same request id. What an undisturbed run would not have continued is not sent: a partial that ends in a stop
    token is "stop", one that uses up its budget is "length". Nothing generated yet: the original request again.

    `min_tokens` shrinks by what exists. A seed makes the whole reproducible for the same interruptions: later
    segments draw from a seed derived from it and from the number of tokens so far, since repeating the seed would
    repeat its draws.

    Args:
        wait_until_resumed: awaited before each further attempt, for at most `resume_timeout_s` seconds.
        max_attempts: requests made for one completion; when they are used up the completion says ABORT.
        max_context: tokens of prompt and completion that end a completion with "length".

    Raises:
        GenerationError: routed experts were asked for, and a part came without them.
    """

    async def resuming(
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        whole: Completion | None = None
        for attempt in range(max_attempts):
            if attempt and not await _resumed(wait_until_resumed, resume_timeout_s):
                break
            part = await generate(
                prompt_token_ids if whole is None else [*prompt_token_ids, *whole.token_ids],
                request_id=request_id,
                session_id=session_id,
                sampling=sampling if whole is None else remaining_sampling(sampling, len(whole.token_ids)),
            )
            if sampling.return_routed_experts and part.token_ids and part.routed_experts is None:
                raise GenerationError(f"request {request_id!r} asked for routed experts and got none")
            whole = part if whole is None else merge_completions(whole, part)
            if whole.finish_reason is not FinishReason.ABORT:
                return whole
            if (ending := _ending(whole, sampling, len(prompt_token_ids), max_context)) is not None:
                return replace(whole, finish_reason=ending)
        assert whole is not None, "max_attempts is at least 1"
        return whole

    if max_attempts < 1:
        raise ValueError(f"max_attempts is {max_attempts}; it must be at least 1")
    return resuming


def remaining_sampling(sampling: SamplingParams, num_tokens: int) -> SamplingParams:
    """What is left of a request's parameters after `num_tokens` of its tokens.

    Example: `SamplingParams(max_tokens=8, min_tokens=4)` after 6 tokens is `SamplingParams(max_tokens=2)`.
    """
    if num_tokens == 0:
        return sampling
    seed = sampling.seed
    return replace(
        sampling,
        max_tokens=sampling.max_tokens - num_tokens,
        min_tokens=max(0, sampling.min_tokens - num_tokens),
        seed=None if seed is None else zlib.crc32(f"{seed}/{num_tokens}".encode()),
    )


def merge_completions(first: Completion, second: Completion) -> Completion:
    """`second` continues `first`. Associative, so that parts may be merged as they come.

    The ending is the second's, the latency and cached prompt tokens are those of the first, queue times add up, and
    `inter_token_s` is the mean over both. `num_resumes` counts the seams.
    """
    spans = list(first.version_spans)
    for span in second.version_spans:
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].num_tokens + span.num_tokens)
        else:
            spans.append(span)
    experts = None
    if first.routed_experts is not None or second.routed_experts is not None:
        experts = [*_rows(first.routed_experts), *_rows(second.routed_experts)]
    return Completion(
        first.request_id,
        [*first.token_ids, *second.token_ids],
        [*first.logprobs, *second.logprobs],
        second.finish_reason,
        tuple(spans),
        experts,
        _merge_metrics(first, second),
    )


def _merge_metrics(first: Completion, second: Completion) -> dict[str, float]:
    before, after = first.metrics, second.metrics
    merged = {**after, **before}
    if "queue_s" in before or "queue_s" in after:
        merged["queue_s"] = before.get("queue_s", 0.0) + after.get("queue_s", 0.0)
    weights = [
        (part.metrics["inter_token_s"], len(part.token_ids))
        for part in (first, second)
        if part.token_ids and "inter_token_s" in part.metrics
    ]
    if weights:
        merged["inter_token_s"] = sum(mean * count for mean, count in weights) / sum(count for _, count in weights)
    merged["num_resumes"] = before.get("num_resumes", 0.0) + after.get("num_resumes", 0.0) + 1
    return merged


def _ending(
    whole: Completion, sampling: SamplingParams, num_prompt_tokens: int, max_context: int | None
) -> FinishReason | None:
    """How an aborted completion would have ended at its last token, had nobody interrupted it."""
    num_tokens = len(whole.token_ids)
    if num_tokens and num_tokens >= sampling.min_tokens and whole.token_ids[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_tokens >= sampling.max_tokens or num_prompt_tokens + num_tokens == max_context:
        return FinishReason.LENGTH
    return None


async def _resumed(wait: Callable[[], Awaitable[object]] | None, timeout_s: float) -> bool:
    if wait is None:
        await asyncio.sleep(0)
        return True
    try:
        async with asyncio.timeout(timeout_s):
            await wait()
    except TimeoutError:
        return False
    return True


def _rows(routed_experts: Sequence[object] | None) -> Sequence[object]:
    return () if routed_experts is None else routed_experts
