"""Open `generate` and `pull` calls of an engine loop, and delivery of their results to event loops."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from titan_rl.core.arrays import LOGPROBS, TOKENS, ExpertRows, NumberArray, expert_rows, joined_rows
from titan_rl.core.calls.user_code import summary
from titan_rl.core.clock import Clock
from titan_rl.core.errors import StateDictError, UnavailableWeightsError
from titan_rl.core.tensor_checksum import TensorChecksum
from titan_rl.generation.engine import LoadedPolicy, TokenDelta, problem_of
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.types import PullResult
from titan_rl.types import Completion, FinishReason, PromptScores, TokenChunk, VersionSpan

logger = logging.getLogger(__name__)


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
        self, request: EngineRequest, future: asyncio.Future[Completion], on_chunk: OnChunk | None, clock: Clock
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

    def extend(self, delta: TokenDelta, step_began: float, now: float) -> str | None:
        """Add the tokens of one step. Returns the reason if they are invalid for the request."""
        if (problem := problem_of(delta, self.request)) is not None:
            return problem
        self._metrics.setdefault("queue_s", step_began - self.created_at)  # ends with the step of the first delta
        try:
            self.token_ids.extend(delta.token_ids)
            self.logprobs.extend(delta.logprobs)
            if self.request.sampling.return_routed_experts and delta.routed_experts is not None and delta.token_ids:
                rows = expert_rows(delta.routed_experts)
                self._routed_experts.extend(rows[row : row + 1] for row in range(len(rows)))
            if self.request.sampling.top_logprobs:
                self._top_logprobs.extend(delta.top_logprobs or ())
            if self.request.sampling.constraint is not None:
                self._allowed_logprobs.extend(delta.allowed_logprobs or ())
        except (TypeError, OverflowError) as error:
            return f"got invalid tokens: {error}"
        if delta.prompt_scores is not None:
            self._prompt_scores = delta.prompt_scores
        if delta.metrics:
            self._metrics.update(delta.metrics)
        if delta.token_ids:
            self._last_token_at = now
            if self._first_token_at is None:
                self._first_token_at = now
        return None

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
        metrics.setdefault("queue_s", self._clock.now() - self.created_at)  # the request never ran
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


Items = Iterable[tuple[str, Any]]
Verify = Callable[[LoadedPolicy], object]


@dataclass(frozen=True, slots=True)
class Weights:
    """One version as a rank reads it."""

    items: Items
    verify: Verify | None = None  # checks the loaded engine, and raises if the weights are wrong
    published: Mapping[str, TensorChecksum] = field(default_factory=dict[str, TensorChecksum])
    pinned: int | None = None  # version that an engine which pins versions keeps in addition


class PendingPull:
    """One `pull` call. Constructed in the caller's event loop; see `EngineLoop.pull` for the arguments."""

    def __init__(self, version: int, manifest: Any, adapter: str = "") -> None:
        self.version = version
        self.adapter = adapter
        self.manifest = manifest
        self.future: asyncio.Future[PullResult] = asyncio.get_running_loop().create_future()
        self.weights = Weights(())
        self._source: Any = None

    def open(
        self, make_items: Callable[[], Items], verify: Verify | None, published: Any, pinned: int | None = None
    ) -> None:
        """Read the first pair, before which a transport does all its checks, and put it back.

        Raises:
            UnavailableWeightsError: the version could not be opened or read.
        """
        try:
            self._source = iter(make_items())
            first = next(self._source, None)
        except StateDictError as error:
            raise UnavailableWeightsError(str(error)) from error
        except BaseException as error:  # CancelledError would look like the caller's; futures cannot hold StopIteration
            raise UnavailableWeightsError(f"version {self.version} could not be opened: {summary(error)}") from error
        items = () if first is None else chain([first], self._source)
        self.weights = Weights(items, verify, published or {}, pinned)

    def close(self) -> None:
        """Close the source of the items. An error is only logged, because the weights were loaded and verified."""
        try:
            if (close := getattr(self._source, "close", None)) is not None:
                close()
        except BaseException:  # raised by a transport, of any type
            logger.exception("the source of version %d failed to close", self.version)
