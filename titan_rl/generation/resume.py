"""Continuation of aborted completions, and listeners to the tokens of a call."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

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


RequestFn = Callable[[EngineRequest, OnChunk | None], Awaitable[Completion]]
"""Answers a request, and reports its tokens as they come: `GeneratorRouter.stream`."""


@dataclass(slots=True)
class Attempt:
    """One attempt at a request, for the steps around it. Generation, or a step in its place, sets `answer`."""

    request: EngineRequest
    on_chunk: OnChunk | None
    answer: Completion | None = None


Step = Callable[[Attempt], AbstractContextManager[object]]
"""Context manager around an attempt. A step that sets `answer` before it yields answers in the place of the following
steps and of generation; after it has yielded, it may check or replace the answer."""


class Generation:
    """A `GenerateFn` that passes each request through a list of steps, the first of them outermost.

    This is where keyword arguments become an `EngineRequest`; everything behind it takes that.

    Example:

        generate = Generation(router.stream, around_request=[sessions.step], around_attempt=[journal.step])

    Args:
        around_request: entered once for each call, with `answer` set at its end.
        around_attempt: entered for each attempt: several if `resume` continues aborted completions.
        ready: awaited before each attempt.
        resume: continues aborted completions. By default the caller gets them.
    """

    def __init__(
        self,
        ask: RequestFn,
        *,
        around_request: Sequence[Step] = (),
        around_attempt: Sequence[Step] = (),
        ready: Callable[[], Awaitable[object]] | None = None,
        resume: Resume | None = None,
    ) -> None:
        self._ask = ask
        self._around_request = around_request
        self._around_attempt = around_attempt
        self._ready = ready
        self._resume = resume

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        call = Attempt(EngineRequest(request_id, prompt_token_ids, sampling, session_id), listener())
        with ExitStack() as stack:
            for step in self._around_request:
                stack.enter_context(step(call))
            if self._resume is None:
                call.answer = await self._attempt(call.request, call.on_chunk)
            else:
                call.answer = await self._resume.whole(self._attempt, call.request, call.on_chunk)
        return call.answer

    async def _attempt(self, request: EngineRequest, on_chunk: OnChunk | None) -> Completion:
        attempt = Attempt(request, on_chunk)
        if self._ready is not None:
            await self._ready()
        with ExitStack() as stack:
            for step in self._around_attempt:
                stack.enter_context(step(attempt))
                if attempt.answer is not None:
                    break
            else:
                attempt.answer = await self._ask(attempt.request, attempt.on_chunk)
        return cast("Completion", attempt.answer)  # an answer of another type is judged by the caller


def request_fn(generate: GenerateFn) -> RequestFn:
    """A `GenerateFn` as a function of requests. Tokens are reported as far as the function behind it streams."""

    async def ask(request: EngineRequest, on_chunk: OnChunk | None) -> Completion:
        with listening(on_chunk):
            return await request.sent_to(generate)

    return ask


def resume_on_abort(
    generate: GenerateFn,
    *,
    wait_until_resumed: Callable[[], Awaitable[object]] | None = None,
    resume_timeout_s: float = 300.0,
    max_attempts: int | None = None,
    max_context: int | None = None,
) -> GenerateFn:
    """Wrap `generate` so that its callers see whole completions. See `Resume`, which has the same arguments.

    Raises:
        ValueError: `max_attempts` is less than 1.
    """
    resume = Resume(wait_until_resumed, resume_timeout_s, max_attempts, max_context)
    return Generation(request_fn(generate), resume=resume)


class Resume:
    """Continuation of aborted completions: the one place that sends a request again with the tokens so far.

    While a completion says ABORT, the prompt with the tokens so far is sent again with the budget that remains, under
    the same request id. A partial completion that an undisturbed run would not have continued is not sent: one that
    ends in a stop token is "stop", one that uses up its budget is "length", and one that had ended before the abort
    reached it keeps its reason. If nothing is generated yet, the original request is sent again.

    `min_tokens` shrinks by the tokens that exist. A seed makes the whole reproducible for the same interruptions:
    later segments draw from a seed derived from it and from the number of tokens so far, since repeating the seed would
    repeat its draws. When the rollout's own time is up, its tokens are returned as aborted (`core/calls/stopwatch.py`).

    Completions have the metric `interrupted_s`, the seconds they waited, if they did.

    Args:
        wait_until_resumed: awaited before each further attempt.
        resume_timeout_s: limit of each such wait; and of a time in which one attempt after the other is aborted at once
            without a token, repeated at growing intervals. When it has passed the completion says ABORT.
        max_attempts: requests made for one completion; when they are used up it says ABORT. None sets no limit.
        max_context: tokens of prompt and completion that end a completion with "length".

    Raises:
        ValueError: `max_attempts` is less than 1.
    """

    def __init__(
        self,
        wait_until_resumed: Callable[[], Awaitable[object]] | None = None,
        resume_timeout_s: float = 300.0,
        max_attempts: int | None = None,
        max_context: int | None = None,
    ) -> None:
        if max_attempts is not None and max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts}; it must be at least 1")
        self._wait_until_resumed = wait_until_resumed
        self._timeout_s = resume_timeout_s
        self._max_attempts = max_attempts
        self._max_context = max_context

    async def whole(self, ask: RequestFn, request: EngineRequest, on_chunk: OnChunk | None) -> Completion:
        """The completion of all attempts together. `on_chunk` receives all tokens of an attempt before the next.

        Raises:
            GenerationError: routed experts were asked for, and a part came without them.
            TypeError: `ask` returned something else than a completion.
        """
        if self._max_context is not None:
            room = max(1, self._max_context - len(request.prompt_token_ids))
            request = replace(request, sampling=request.sampling.within(room))
        partial = Partial(request)
        loop, interrupted_s = asyncio.get_running_loop(), 0.0

        def timed(completion: Completion) -> Completion:
            if not interrupted_s:
                return completion
            before = completion.metrics.get("interrupted_s", 0.0)
            return replace(completion, metrics={**completion.metrics, "interrupted_s": before + interrupted_s})

        turned_away = _TurnedAway(self._timeout_s)
        for attempt in count(1):
            began, rest = loop.time(), partial.rest
            if on_chunk is None:
                part = await ask(rest, None)
            else:
                part = await told_whole(lambda tell, rest=rest: ask(rest, tell), on_chunk)
            if not isinstance(part, Completion):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"generate gave {type(part).__name__}; it must give a Completion")
            if request.sampling.return_routed_experts and part.token_ids and part.routed_experts is None:
                raise GenerationError(f"request {request.request_id!r} asked for routed experts and got none")
            whole = partial.add(part)
            if whole.finish_reason is not FinishReason.ABORT:
                return timed(whole)
            if (ended := partial.ended) is not None:
                return timed(ended)
            if stopwatch.time_is_up():
                return timed(whole)
            aborted = loop.time()
            again = attempt != self._max_attempts and await _resumed(self._wait_until_resumed, self._timeout_s)
            again = again and await turned_away.wait(bool(part.token_ids), since=began)
            interrupted_s += loop.time() - aborted
            if not again:
                return timed(whole)
        raise AssertionError("attempts are counted without end")


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
