"""Continuation of aborted completions, and listeners to the tokens of a call."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import count

from titan_rl.core.arrays import TOKENS, token_array
from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.bounded import OutOfTimeError, bounded
from titan_rl.core.errors import GenerationError
from titan_rl.generation.request import EngineRequest, OnChunk, Partial, tokens_between
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, TokenChunk

_listener: ContextVar[OnChunk | None] = ContextVar("listener", default=None)


def listener() -> OnChunk | None:
    """The listener of the present call, if any."""
    return _listener.get()


@contextmanager
def listening(on_chunk: OnChunk | None) -> Generator[None]:
    """Within the block calls of a `GenerateFn` tell `on_chunk` of tokens as they come, in order, as far as what is
    behind the function streams. What is told is the beginning of the completion; `told_whole` tells the rest."""
    token = _listener.set(on_chunk)
    try:
        yield
    finally:
        _listener.reset(token)


async def told_whole(ask: Callable[[OnChunk], Awaitable[Completion]], on_chunk: OnChunk) -> Completion:
    """The answer of `ask`, all of whose tokens `on_chunk` is told of, those that `ask` had not told at its end. Nothing
    is told after that.

    Raises:
        GenerationError: the answer has other tokens than were told of it.
    """
    told = array(TOKENS)
    is_over = False

    def tell(chunk: TokenChunk) -> None:
        if chunk.token_ids and not is_over:
            told.extend(token_array(chunk.token_ids).array())
            on_chunk(chunk)

    try:
        completion = await ask(tell)
    finally:
        is_over = True
    if not isinstance(completion, Completion):  # pyright: ignore[reportUnnecessaryIsInstance]
        return completion  # for who called to judge
    if token_array(completion.token_ids[: len(told)]).array() != told:
        raise GenerationError(f"request {completion.request_id!r} was answered with other tokens than it had streamed")
    if len(told) < len(completion.token_ids):
        on_chunk(tokens_between(completion, len(told), len(completion.token_ids)))
    return completion


def resume_on_abort(
    generate: GenerateFn,
    *,
    wait_until_resumed: Callable[[], Awaitable[object]] | None = None,
    resume_timeout_s: float = 300.0,
    max_attempts: int | None = None,
    max_context: int | None = None,
) -> GenerateFn:
    """Wrap `generate` so that its callers see whole completions.

    While a completion says ABORT, the prompt with the tokens so far is sent again with the budget that remains, under
    the same request id. What an undisturbed run would not have continued is not sent: a partial that ends in a stop
    token is "stop", one that uses up its budget is "length", one that had ended before it heard of the abort is what
    it was. Nothing generated yet: the original request again.

    `min_tokens` shrinks by what exists. A seed makes the whole reproducible for the same interruptions: later
    segments draw from a seed derived from it and from the number of tokens so far, since repeating the seed would
    repeat its draws. When the rollout's own time is up what there is comes back aborted (`core/calls/stopwatch.py`).

    Args:
        wait_until_resumed: awaited before each further attempt.
        resume_timeout_s: of each such wait; and of a time in which one attempt after the other is aborted at once
            without a token, ever more slowly repeated. When it has passed the completion says ABORT.
        max_attempts: requests made for one completion; when they are used up it says ABORT. None sets no limit.
        max_context: tokens of prompt and completion that end a completion with "length".

    Returns:
        A `GenerateFn` whose completions have the metric `interrupted_s`, the seconds they waited, if they did.

    Raises:
        GenerationError: routed experts were asked for, and a part came without them.
        TypeError: `generate` gave something else than a completion.
    """

    async def resuming(
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        if max_context is not None:
            sampling = sampling.within(max(1, max_context - len(prompt_token_ids)))
        partial = Partial(EngineRequest(request_id, prompt_token_ids, sampling, session_id))
        loop, interrupted_s = asyncio.get_running_loop(), 0.0

        def timed(completion: Completion) -> Completion:
            if not interrupted_s:
                return completion
            before = completion.metrics.get("interrupted_s", 0.0)
            return replace(completion, metrics={**completion.metrics, "interrupted_s": before + interrupted_s})

        turned_away = _TurnedAway(resume_timeout_s)
        for attempt in count(1):
            began = loop.time()
            part = await _heard(partial.rest, generate)
            if not isinstance(part, Completion):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"generate gave {type(part).__name__}; it must give a Completion")
            if sampling.return_routed_experts and part.token_ids and part.routed_experts is None:
                raise GenerationError(f"request {request_id!r} asked for routed experts and got none")
            whole = partial.add(part)
            if whole.finish_reason is not FinishReason.ABORT:
                return timed(whole)
            if (ended := partial.ended) is not None:
                return timed(ended)
            if stopwatch.time_is_up():
                return timed(whole)
            aborted = loop.time()
            again = attempt != max_attempts and await _resumed(wait_until_resumed, resume_timeout_s)
            again = again and await turned_away.wait(bool(part.token_ids), since=began)
            interrupted_s += loop.time() - aborted
            if not again:
                return timed(whole)
        raise AssertionError("attempts are counted without end")

    if max_attempts is not None and max_attempts < 1:
        raise ValueError(f"max_attempts is {max_attempts}; it must be at least 1")
    return resuming


def _heard(request: EngineRequest, generate: GenerateFn) -> Awaitable[Completion]:
    """One attempt. Whoever listens is told of all its tokens before the next."""
    if (on_chunk := listener()) is None:
        return request.sent_to(generate)

    async def ask(tell: OnChunk) -> Completion:
        with listening(tell):
            return await request.sent_to(generate)

    return told_whole(ask, on_chunk)


class _TurnedAway:
    """Attempts that are aborted at once and bring nothing, one after the other, must not become a busy loop."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waited_s = 0.0
        self._in_a_row = 0

    async def wait(self, got_tokens: bool, *, since: float) -> bool:
        """Wait until the next attempt may be made, and return whether it may.

        Args:
            since: when the last attempt began; what has passed since need not be waited for.
        """
        if got_tokens:
            self._in_a_row, self._waited_s = 0, 0.0
            return True
        self._in_a_row += 1
        interval_s = 0.0 if self._in_a_row == 1 else min(1.0, 0.01 * 2 ** min(self._in_a_row, 7))
        seconds = max(0.0, since + interval_s - asyncio.get_running_loop().time())
        self._waited_s += seconds
        if self._waited_s > self._limit_s:
            return False
        with stopwatch.paused():
            await asyncio.sleep(seconds)
        return True


async def _resumed(wait: Callable[[], Awaitable[object]] | None, timeout_s: float) -> bool:
    if wait is None:
        return True
    try:
        with stopwatch.paused():
            await bounded(wait(), timeout_s, "wait_until_resumed")
    except OutOfTimeError:
        return False
    return True
