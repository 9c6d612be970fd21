"""Open `generate` calls of an engine loop, and delivery of their results to event loops."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan_rl.core.arrays import LOGPROBS, TOKENS, ExpertRows, NumberArray, expert_rows, joined_rows
from titan_rl.core.clock import Clock
from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.generation.engine import TokenDelta, problem_of
from titan_rl.generation.request import EngineRequest, OnChunk, aborted_late
from titan_rl.types import Completion, FinishReason, PromptScores, TokenChunk, VersionSpan


class Outbox:
    """Results and chunks for callers in several event loops, delivered in order with one wake-up for each loop."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any]]] = {}

    def resolve(self, future: asyncio.Future[Any], value: Any) -> None:
        """Make `value` the future's result, or its exception if it is one."""
        self._by_loop.setdefault(future.get_loop(), []).append((future, value))

    def stream(self, call: PendingCall, chunk: TokenChunk) -> None:
        """Pass a chunk to the call's `on_chunk`."""
        self._by_loop.setdefault(call.future.get_loop(), []).append((call, chunk))

    def send(self) -> None:
        if not self._by_loop:
            return
        batches, self._by_loop = self._by_loop, {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, loop, batch)
            except RuntimeError:  # the loop is closed, so nobody awaits the results any more
                assert loop.is_closed()


def _deliver(loop: asyncio.AbstractEventLoop, batch: list[tuple[Any, Any]]) -> None:
    for target, value in batch:
        if isinstance(target, PendingCall):
            try:
                assert target.on_chunk is not None
                target.on_chunk(value)
            except Exception as error:
                loop.call_exception_handler({"message": f"{target.on_chunk!r} failed", "exception": error})
        elif target.done():  # the caller has been cancelled
            continue
        elif isinstance(value, BaseException):
            target.set_exception(value)
        else:
            target.set_result(value)


class PendingCall:
    """One `generate` call and the tokens that the engine has produced for it."""

    def __init__(
        self,
        request: EngineRequest,
        future: asyncio.Future[Completion],
        on_chunk: OnChunk | None,
        clock: Clock,
    ) -> None:
        self.request = request
        self.future = future
        self.on_chunk = on_chunk
        self.created_at = clock.now()
        self._clock = clock
        self.token_ids = array(TOKENS)
        self.logprobs = array(LOGPROBS)
        self._routed_experts: list[ExpertRows] = []  # lists of one token's values
        self._top_logprobs: list[Sequence[tuple[int, float]]] = []
        self._allowed_logprobs = array(LOGPROBS)
        self._prompt_scores: PromptScores | None = None
        self._marks: list[tuple[int, int]] = []  # (index of the first token, version)
        self._metrics: dict[str, float] = {}
        self._streamed = 0
        self._first_token_at: float | None = None
        self._last_token_at = self.created_at

    def admit(self, version: int, requests_in_flight: int) -> None:
        self._metrics["requests_in_flight"] = float(requests_in_flight)
        self.mark(version)

    def mark(self, version: int) -> None:
        """Note that `version` produces the tokens from here on."""
        self._marks.append((len(self.token_ids), version))

    def extend(self, delta: TokenDelta, step_began: float, now: float) -> None:
        """Add the tokens of one step.

        Raises:
            TypeError: tokens, logprobs or experts are not numbers.
            OverflowError: a token is too large.
        """
        self._metrics.setdefault("queue_s", step_began - self.created_at)  # ends with the step of the first delta
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if self.request.sampling.return_routed_experts and delta.routed_experts is not None and delta.token_ids:
            rows = expert_rows(delta.routed_experts)
            self._routed_experts.extend(rows[row : row + 1] for row in range(len(rows)))
        if self.request.sampling.top_logprobs:
            self._top_logprobs.extend(delta.top_logprobs or ())
        if self.request.sampling.constraint is not None:
            self._allowed_logprobs.extend(delta.allowed_logprobs or ())
        if delta.prompt_scores is not None:
            self._prompt_scores = delta.prompt_scores
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
        """All tokens so far."""
        metrics = self._metrics
        metrics.setdefault("queue_s", self._clock.now() - self.created_at)  # of a request that never ran
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
            prompt_scores=self._prompt_scores,
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


class PendingCalls:
    """Open calls of a loop. A call waits until a step lets it join the batch, and then runs until it is resolved.

    Only `LoopState` uses it, and holds its lock while it does.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.waiting: dict[str, PendingCall] = {}
        self.running: dict[str, PendingCall] = {}
        self.aborting: set[str] = set()  # running requests that the engine is to forget
        self._outbox = outbox

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, call: PendingCall) -> None:
        """Queue a call.

        Raises:
            RequestError: a request with the same id is in flight, and not being aborted.
        """
        request_id = call.request.request_id
        is_ending = request_id in self.aborting
        if request_id in self.waiting or (request_id in self.running and not is_ending):
            raise RequestError(f"request_id {request_id!r} is already in flight; ids must be unique")
        self.waiting[request_id] = call

    def forget(self, call: PendingCall) -> None:
        """Drop a call whose caller was cancelled."""
        request_id = call.request.request_id
        if self.waiting.get(request_id) is call:
            del self.waiting[request_id]
        elif self.running.get(request_id) is call:
            self.aborting.add(request_id)

    def abort(self, request_ids: Iterable[str] | None) -> None:
        """Resolve requests that the engine has not seen, and mark the others for it to forget. None aborts all."""
        for request_id in [*self.waiting, *self.running] if request_ids is None else request_ids:
            if (call := self.waiting.pop(request_id, None)) is not None:
                self._outbox.resolve(call.future, call.completion(FinishReason.ABORT))
            if request_id in self.running:
                self.aborting.add(request_id)

    def give_up(self) -> int:
        """Resolve the calls that are being aborted, without waiting for the engine. Returns their number."""
        calls = [self.running.pop(request_id) for request_id in self.aborting if request_id in self.running]
        for call in calls:
            self._outbox.resolve(call.future, call.completion(FinishReason.ABORT))
        return len(calls)

    def admit(self, version_of: Mapping[str, int]) -> tuple[EngineRequest, ...]:
        """Let waiting calls join the batch; their next tokens belong to the version of their adapter."""
        admitted = tuple(self.waiting.values())
        self.running.update(self.waiting)
        self.waiting.clear()
        for call in admitted:
            wanted = call.request.version
            call.admit(version_of[call.request.adapter] if wanted is None else wanted, len(self.running))
        return tuple(call.request for call in admitted)

    def mark(self, version: int, adapter: str) -> None:
        """Note that `version` of an adapter produces the tokens of its requests from here on."""
        for call in self.running.values():
            if call.request.adapter == adapter:
                call.mark(version)

    def absorb(self, deltas: Iterable[TokenDelta], began: float, now: float) -> tuple[str, ...]:
        """Pass the tokens of a step to their calls.

        Returns:
            Requests that failed, which the engine is to forget.
        """
        failed: list[str] = []
        for delta in deltas:
            call = self.running.get(delta.request_id)
            if call is None:  # the caller no longer waits
                continue
            problem = problem_of(delta, call.request)
            if problem is None:
                try:
                    call.extend(delta, began, now)
                except (TypeError, OverflowError) as error:
                    problem = f"got what are no tokens: {error}"
            if problem is not None:
                self.reject({delta.request_id: GenerationError(f"request {delta.request_id!r} {problem}")})
                failed.append(delta.request_id)
            elif delta.finish_reason is not None:
                self._finish(call, delta.finish_reason)
        return tuple(failed)

    def reject(self, errors: Mapping[str, Exception]) -> None:
        """Fail running requests, by id."""
        for request_id, error in errors.items():
            self.aborting.discard(request_id)
            if (call := self.running.pop(request_id, None)) is not None:
                self._outbox.resolve(call.future, error)

    def stream(self, *, also_empty: bool) -> None:
        """Send each call its tokens since the last chunk.

        Args:
            also_empty: Whether calls without new tokens receive an empty chunk.
        """
        for call in self.running.values():
            if call.on_chunk is not None and (call.num_unstreamed or also_empty):
                self._outbox.stream(call, call.take_chunk())

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Resolve requests that the engine has forgotten."""
        for request_id in request_ids:
            self.aborting.discard(request_id)
            if (call := self.running.pop(request_id, None)) is not None:
                self._outbox.resolve(call.future, call.completion(FinishReason.ABORT))

    def clear(self, adapter: str | None = None) -> tuple[list[PendingCall], tuple[str, ...]]:
        """Remove the calls of an adapter, or all calls.

        Returns:
            The removed calls, which the caller must fail, and the ids of those that ran.
        """

        def removed(calls: dict[str, PendingCall]) -> list[PendingCall]:
            return [call for call in calls.values() if adapter is None or call.request.adapter == adapter]

        waiting, running = removed(self.waiting), removed(self.running)
        ids = tuple(call.request.request_id for call in running)
        for call in waiting:
            del self.waiting[call.request.request_id]
        for request_id in ids:
            del self.running[request_id]
        self.aborting.difference_update(ids)
        return [*waiting, *running], ids

    def _finish(self, call: PendingCall, finish_reason: FinishReason) -> None:
        request_id = call.request.request_id
        del self.running[request_id]
        completion = call.completion(finish_reason)
        if request_id in self.aborting:
            self.aborting.discard(request_id)
            completion = aborted_late(completion)
        self._outbox.resolve(call.future, completion)
