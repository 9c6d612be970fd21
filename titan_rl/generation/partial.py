"""Completions that come in parts: of several attempts, and of the chunks that each of these streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.types import Completion, FinishReason, TokenChunk, VersionSpan


class Partial:
    """A request and what it has got so far, from all the attempts that were made at it.

    Example: 40 of 64 tokens were streamed when the replica died. The rest is a request for 24 tokens, behind the prompt
    and the 40:

        partial = Partial(request)
        await replica.stream(partial.rest, partial.begin())  # raises
        partial.keep_chunks()
        completion = partial.add(await another.stream(partial.rest, partial.begin()))
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self._kept: Completion | None = None  # of attempts that are over
        self._chunks: list[TokenChunk] = []  # of the present one

    @property
    def rest(self) -> EngineRequest:
        """What the next attempt is to ask for."""
        return self.request if self._kept is None else self.request.after(self._kept.token_ids)

    def begin(self) -> OnChunk:
        """Begin an attempt, and return what takes its chunks. Those that come after its end are dropped."""
        self._chunks = []
        return self._chunks.append

    def keep_chunks(self) -> None:
        """The present attempt is over without an answer."""
        chunks, self._chunks = self._chunks, []
        if chunks:
            self.add(_joined(self.request.request_id, chunks))

    def add(self, answer: Completion) -> Completion:
        """The present attempt is over with this answer. Returns it behind what earlier ones left."""
        self._chunks = []
        whole = answer if self._kept is None else _continued(self._kept, answer)
        if whole.request_id != self.request.request_id:
            whole = replace(whole, request_id=self.request.request_id)
        self._kept = whole
        return whole

    @property
    def ended(self) -> Completion | None:
        """What the attempts that are over left, if nothing is missing of it but its ending: it ended by itself before
        it heard of an abort, in a stop token, or its budget is used up."""
        kept, sampling = self._kept, self.request.sampling
        if kept is None:
            return None
        reason, num_tokens = kept.ended, len(kept.token_ids)
        if reason is None and num_tokens >= max(1, sampling.min_tokens):
            reason = FinishReason.STOP if kept.token_ids[-1] in sampling.stop_token_ids else None
        if reason is None and num_tokens >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        return None if reason is None else replace(kept, finish_reason=reason, ended=None)

    @property
    def so_far(self) -> Completion:
        """Every token known, that of the present attempt as far as it is streamed, as an aborted completion."""
        if not self._chunks and self._kept is not None:
            return self._kept
        parts = self._chunks if self._kept is None else [self._kept, *self._chunks]
        whole = _joined(self.request.request_id, parts)
        return whole if self._kept is None else replace(whole, metrics=self._kept.metrics)


def aborted_late(completion: Completion) -> Completion:
    """One whose abort was asked for says ABORT however it ended. `ended` keeps that, so that nobody goes on with it."""
    if completion.finish_reason is FinishReason.ABORT:
        return completion
    return replace(completion, finish_reason=FinishReason.ABORT, ended=completion.finish_reason)


def _joined(request_id: str, parts: Sequence[Completion | TokenChunk]) -> Completion:
    """The tokens of consecutive parts, as an aborted completion."""
    spans: list[VersionSpan] = []
    for span in (span for part in parts for span in part.version_spans):
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].num_tokens + span.num_tokens)
        else:
            spans.append(span)
    has_experts = any(part.routed_experts is not None for part in parts)
    return Completion(
        request_id,
        [token for part in parts for token in part.token_ids],
        [logprob for part in parts for logprob in part.logprobs],
        FinishReason.ABORT,
        tuple(spans),
        [row for part in parts if part.routed_experts is not None for row in part.routed_experts]
        if has_experts
        else None,
    )


def _continued(first: Completion, second: Completion) -> Completion:
    """`second` continues `first`, and says how the whole ended."""
    return replace(
        _joined(first.request_id, [first, second]),
        finish_reason=second.finish_reason,
        metrics=_continued_metrics(first, second),
        ended=second.ended,
    )


def _continued_metrics(first: Completion, second: Completion) -> dict[str, float]:
    """Latency and cached prompt tokens are those of the first; queued and interrupted times add up; `inter_token_s` is
    the mean over both; `num_resumes` counts the seams; others are those of the first that has them."""
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
