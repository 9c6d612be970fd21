"""What it means to go on with a completion: what is left of its budget, and one whole made of parts."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan


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


def aborted_late(completion: Completion) -> Completion:
    """One whose abort was asked for says ABORT however it ended. `ended` keeps that, so that nobody goes on with it."""
    if completion.finish_reason is FinishReason.ABORT:
        return completion
    return replace(completion, finish_reason=FinishReason.ABORT, ended=completion.finish_reason)


def merge_completions(first: Completion, second: Completion) -> Completion:
    """`second` continues `first`. Associative, so that parts may be merged as they come.

    The ending is the second's, the latency and cached prompt tokens are those of the first, queued and interrupted
    times add up, and `inter_token_s` is the mean over both. `num_resumes` counts the seams.
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
        second.ended,
    )


def _merge_metrics(first: Completion, second: Completion) -> dict[str, float]:
    before, after = first.metrics, second.metrics
    merged = {**after, **before}
    for name in ("queue_s", "interrupted_s"):
        if name in before or name in after:
            merged[name] = before.get(name, 0.0) + after.get(name, 0.0)
    weights = [
        (part.metrics["inter_token_s"], len(part.token_ids))
        for part in (first, second)
        if part.token_ids and "inter_token_s" in part.metrics
    ]
    if weights:
        merged["inter_token_s"] = sum(mean * count for mean, count in weights) / sum(count for _, count in weights)
    merged["num_resumes"] = before.get("num_resumes", 0.0) + after.get("num_resumes", 0.0) + 1
    return merged


def ending(
    whole: Completion, sampling: SamplingParams, num_prompt_tokens: int, max_context: int | None
) -> FinishReason | None:
    """How an aborted completion would have ended at its last token, had nobody interrupted it."""
    if whole.ended is not None:
        return whole.ended
    num_tokens = len(whole.token_ids)
    if num_tokens and num_tokens >= sampling.min_tokens and whole.token_ids[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    room = math.inf if max_context is None else max_context
    if num_tokens >= sampling.max_tokens or num_prompt_tokens + num_tokens >= room:
        return FinishReason.LENGTH
    return None


def _rows(routed_experts: Sequence[object] | None) -> Sequence[object]:
    return () if routed_experts is None else routed_experts
