"""The open `generate` calls of an engine loop, and the delivery of results to their event loops."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from titan_rl.core.arrays import LOGPROBS, TOKENS, ExpertRows, NumberArray, expert_rows, joined_rows
from titan_rl.core.clock import Clock
from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.generation.engine import TokenDelta, problem_of
from titan_rl.generation.request import EngineRequest, OnChunk, aborted_late
from titan_rl.types import Completion, FinishReason, TokenChunk, VersionSpan


class Outbox:
    """Results for the futures of several event loops, delivered with one wake-up for each loop."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any]]] = {}

    def resolve(self, future: asyncio.Future[Any], value: Any) -> None:
        """`value` becomes the future's result, or its exception if it is one."""
        self._by_loop.setdefault(future.get_loop(), []).append((future, value))

    def call(self, loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], value: Any) -> None:
        """`function(value)` runs on `loop`, in order with the results."""
        self._by_loop.setdefault(loop, []).append((function, value))

    def send(self) -> None:
        if not self._by_loop:
            return
        batches, self._by_loop = self._by_loop, {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, loop, batch)
            except RuntimeError:  # the loop is closed, so nobody awaits these any more
                assert loop.is_closed()


def _deliver(loop: asyncio.AbstractEventLoop, batch: list[tuple[Any, Any]]) -> None:
    for target, value in batch:
        if not isinstance(target, asyncio.Future):
            try:
                target(value)
            except Exception as error:
                loop.call_exception_handler({"message": f"{target!r} failed", "exception": error})
        elif target.done():  # its caller has been cancelled
            continue
        elif isinstance(value, BaseException):
            target.set_exception(value)
        else:
            target.set_result(value)


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
        clock: Clock,
    ) -> None:
        self.request = request
        self.future = future
        self.on_chunk = on_chunk
        self.created_at = clock.now()
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
        metrics.setdefault("queue_s", self._clock.now() - self.created_at)  # it never ran
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


logger = logging.getLogger(__name__)


class PendingCalls:
    """A call waits until a step lets it join the batch, and then runs until it is resolved. Part of a `LoopState`,
    which alone touches it, and under its lock."""

    def __init__(self) -> None:
        self.waiting: dict[str, PendingCall] = {}
        self.running: dict[str, PendingCall] = {}
        self.aborting: set[str] = set()  # running requests that the engine is to forget

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, call: PendingCall) -> None:
        """Queue a call.

        Raises:
            RequestError: its id is in flight, and not being freed.
        """
        request_id = call.request.request_id
        being_freed = request_id in self.aborting
        if request_id in self.waiting or (request_id in self.running and not being_freed):
            raise RequestError(f"request_id {request_id!r} is already in flight; ids must be unique")
        self.waiting[request_id] = call

    def forget(self, call: PendingCall) -> None:
        """Drop a call whose caller is gone."""
        request_id = call.request.request_id
        if self.waiting.get(request_id) is call:
            del self.waiting[request_id]
        elif self.running.get(request_id) is call:
            self.aborting.add(request_id)

    def abort(self, request_ids: Iterable[str] | None, outbox: Outbox) -> None:
        """Resolve what the engine has not seen, and have it forget the rest. None aborts all."""
        for request_id in [*self.waiting, *self.running] if request_ids is None else request_ids:
            if (call := self.waiting.pop(request_id, None)) is not None:
                outbox.resolve(call.future, call.completion(FinishReason.ABORT))
            if request_id in self.running:
                self.aborting.add(request_id)

    def give_up(self, outbox: Outbox) -> int:
        """Resolve those whose abort the engine does not get round to, and return how many."""
        calls = [self.running.pop(request_id) for request_id in self.aborting if request_id in self.running]
        for call in calls:
            outbox.resolve(call.future, call.completion(FinishReason.ABORT))
        return len(calls)

    def admit(self, version: int) -> tuple[EngineRequest, ...]:
        """Let waiting calls join the batch; their next tokens belong to `version`."""
        admitted = tuple(self.waiting.values())
        self.running.update(self.waiting)
        self.waiting.clear()
        for call in admitted:
            call.admit(version, len(self.running))
        return tuple(call.request for call in admitted)

    def mark(self, version: int) -> None:
        """Tokens from here on are of `version`."""
        for call in self.running.values():
            call.mark(version)

    def absorb(self, deltas: Iterable[TokenDelta], began: float, now: float, outbox: Outbox) -> tuple[str, ...]:
        """Hand what a step produced to the calls it is for.

        Returns:
            the requests that failed by it, which the engine is to forget.
        """
        failed: list[str] = []
        for delta in deltas:
            call = self.running.get(delta.request_id)
            if call is None:  # its caller no longer waits
                continue
            problem = problem_of(delta, call.request)
            if problem is None:
                try:
                    call.extend(delta, began, now)
                except (TypeError, OverflowError) as error:
                    problem = f"got what are no tokens: {error}"
            if problem is not None:
                self._reject(delta.request_id, GenerationError(f"request {delta.request_id!r} {problem}"), outbox)
                failed.append(delta.request_id)
                continue
            if delta.finish_reason is not None:
                self._finish(call, delta.finish_reason, outbox)
        return tuple(failed)

    def reject(self, errors: Mapping[str, Exception], outbox: Outbox) -> None:
        """The engine did not take these."""
        for request_id, error in errors.items():
            self._reject(request_id, error, outbox)

    def stream(self, outbox: Outbox, *, also_empty: bool) -> None:
        """Send the tokens since the last call, or also an empty chunk."""
        for call in self.running.values():
            if call.on_chunk is not None and (call.num_unstreamed or also_empty):
                outbox.call(call.future.get_loop(), call.on_chunk, call.take_chunk())

    def aborted(self, request_ids: Iterable[str], outbox: Outbox) -> None:
        """The engine has forgotten these."""
        for request_id in request_ids:
            self.aborting.discard(request_id)
            if (call := self.running.pop(request_id, None)) is not None:
                outbox.resolve(call.future, call.completion(FinishReason.ABORT))

    def clear(self) -> tuple[Sequence[PendingCall], tuple[str, ...]]:
        """Remove all calls.

        Returns:
            all calls, for their owner to fail, and the ids of those that ran.
        """
        calls, running = [*self.waiting.values(), *self.running.values()], tuple(self.running)
        self.waiting.clear()
        self.running.clear()
        self.aborting.clear()
        return calls, running

    def _finish(self, call: PendingCall, finish_reason: FinishReason, outbox: Outbox) -> None:
        request_id = call.request.request_id
        del self.running[request_id]
        completion = call.completion(finish_reason)
        if request_id in self.aborting:
            self.aborting.discard(request_id)
            completion = aborted_late(completion)
        outbox.resolve(call.future, completion)

    def _reject(self, request_id: str, error: Exception, outbox: Outbox) -> None:
        self.aborting.discard(request_id)
        if (call := self.running.pop(request_id, None)) is not None:
            outbox.resolve(call.future, error)
