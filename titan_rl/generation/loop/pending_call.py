"""One open `generate` call of an engine loop."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from titan_rl.core.arrays import LOGPROBS, TOKENS, ExpertRows, NumberArray, expert_rows, joined_rows
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.types import Completion, FinishReason, TokenChunk, VersionSpan


class PendingCall:
    """One `generate` call and what the engine has produced for it. Filled by the engine's thread, and completed
    under the lock of `LoopState`."""

    __slots__ = (
        "_allowed_logprobs",
        "_clock",
        "_first_token_at",
        "_last_token_at",
        "_marks",
        "_metrics",
        "_routed_experts",
        "_streamed",
        "_top_logprobs",
        "created_at",
        "future",
        "logprobs",
        "on_chunk",
        "request",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        future: asyncio.Future[Completion],
        on_chunk: OnChunk | None,
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self.future = future
        self.on_chunk = on_chunk
        self.created_at = clock()
        self._clock = clock
        self.token_ids = array(TOKENS)
        self.logprobs = array(LOGPROBS)
        self._routed_experts: list[ExpertRows] = []  # of one token each
        self._top_logprobs: list[Sequence[tuple[int, float]]] = []
        self._allowed_logprobs = array(LOGPROBS)
        self._marks: list[tuple[int, int]] = []  # (index of the first token, version)
        self._metrics: dict[str, float] = {}
        self._streamed = 0
        self._first_token_at: float | None = None
        self._last_token_at = self.created_at

    def admit(self, version: int, requests_in_flight: int) -> None:
        self._metrics["requests_in_flight"] = float(requests_in_flight)
        self.mark(version)

    def mark(self, version: int) -> None:
        """Tokens from here on are produced by `version`."""
        self._marks.append((len(self.token_ids), version))

    def extend(self, delta: TokenDelta, step_began: float, now: float) -> None:
        """
        Raises:
            TypeError: its tokens, logprobs or experts are no numbers.
            OverflowError: a token is too large for one.
        """
        self._metrics.setdefault("queue_s", step_began - self.created_at)  # the first delta's step first ran it
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if self.request.sampling.return_routed_experts and delta.routed_experts is not None and delta.token_ids:
            rows = expert_rows(delta.routed_experts)
            self._routed_experts.extend(rows[place : place + 1] for place in range(len(rows)))
        if self.request.sampling.top_logprobs:
            self._top_logprobs.extend(delta.top_logprobs or ())
        if self.request.sampling.constraint is not None:
            self._allowed_logprobs.extend(delta.allowed_logprobs or ())
        if delta.metrics:
            self._metrics.update(delta.metrics)
        if delta.token_ids:
            self._last_token_at = now
            if self._first_token_at is None:
                self._first_token_at = now

    @property
    def num_unstreamed(self) -> int:
        return len(self.token_ids) - self._streamed

    def take_chunk(self) -> TokenChunk:
        """The tokens since the last chunk."""
        start, self._streamed = self._streamed, len(self.token_ids)
        return TokenChunk(
            self.request.request_id,
            NumberArray(self.token_ids[start:]),
            NumberArray(self.logprobs[start:]),
            self._spans(start),
            joined_rows(self._routed_experts[start:]),
            self._top_logprobs[start:] or None,
            self._allowed(start),
        )

    def completion(self, finish_reason: FinishReason) -> Completion:
        """Everything so far."""
        metrics = self._metrics
        metrics.setdefault("queue_s", self._clock() - self.created_at)  # it never ran
        if self._first_token_at is not None:
            metrics["time_to_first_token_s"] = self._first_token_at - self.created_at
            gaps = max(1, len(self.token_ids) - 1)
            metrics["inter_token_s"] = (self._last_token_at - self._first_token_at) / gaps
        return Completion(
            self.request.request_id,
            NumberArray(self.token_ids[:]),
            NumberArray(self.logprobs[:]),
            finish_reason,
            self._spans(0),
            joined_rows(self._routed_experts),
            metrics,
            top_logprobs=self._top_logprobs[:] or None,
            allowed_logprobs=self._allowed(0),
        )

    def _allowed(self, start: int) -> NumberArray[float] | None:
        return None if self.request.sampling.constraint is None else NumberArray(self._allowed_logprobs[start:])

    def _spans(self, start: int) -> tuple[VersionSpan, ...]:
        spans, end = list[VersionSpan](), len(self.token_ids)
        for index, version in reversed(self._marks):
            if (count := end - max(index, start)) > 0:
                spans.append(VersionSpan(version, count))
            end = min(end, index)
        return tuple(reversed(spans))
