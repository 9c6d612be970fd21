"""What is between a caller's event loop and the engine's thread: the calls that wait, and the results going back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from titan_rl.generation.engine import Engine, TokenDelta
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.types import PullResult
from titan_rl.types import Completion, FinishReason, TokenChunk, VersionSpan

logger = logging.getLogger(__name__)

ErrorT = TypeVar("ErrorT", bound=Exception)


class PendingCall:
    """One `generate` call and what the engine has produced for it. Filled by the engine's thread, and completed
    under the lock of `LoopState`."""

    __slots__ = (
        "_clock",
        "_first_token_at",
        "_last_token_at",
        "_marks",
        "_metrics",
        "_routed_experts",
        "_streamed",
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
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._routed_experts: list[Any] = []
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
        self._metrics.setdefault("queue_s", step_began - self.created_at)  # the first delta's step first ran it
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if self.request.sampling.return_routed_experts:
            self._routed_experts.extend(() if delta.routed_experts is None else delta.routed_experts)
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
            self.token_ids[start:],
            self.logprobs[start:],
            self._spans(start),
            self._routed_experts[start:] or None,
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
            self.token_ids[:],
            self.logprobs[:],
            finish_reason,
            self._spans(0),
            self._routed_experts[:] or None,
            metrics,
        )

    def _spans(self, start: int) -> tuple[VersionSpan, ...]:
        spans, end = list[VersionSpan](), len(self.token_ids)
        for index, version in reversed(self._marks):
            if (count := end - max(index, start)) > 0:
                spans.append(VersionSpan(version, count))
            end = min(end, index)
        return tuple(reversed(spans))


@dataclass(frozen=True, slots=True, eq=False)
class PendingPull:
    """One `pull` call."""

    version: int
    items: Iterable[tuple[str, Any]]
    source: Iterator[tuple[str, Any]]  # what `items` reads from; closed if nobody does
    verify: Callable[[Engine], object] | None
    manifest: Any
    future: asyncio.Future[PullResult]

    def close(self) -> None:
        """Let go of what was opened. What that raises is told of in the log: it is no reason to serve no more, and says
        nothing against weights that were loaded and found right."""
        try:
            if (close := getattr(self.source, "close", None)) is not None:
                close()
        except BaseException:  # a transport's own, whatever it is
            logger.exception("the source of version %d failed to close", self.version)


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


def with_cause(error: ErrorT, cause: BaseException | None) -> ErrorT:
    """`error` as `raise error from cause` would have it."""
    error.__cause__ = cause
    return error
