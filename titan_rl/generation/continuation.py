"""Generation as a list of steps around a request, and continuation of its aborted completions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count
from typing import Any, cast

from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.bounded import OutOfTimeError, bounded
from titan_rl.core.errors import GenerationError
from titan_rl.generation.request import EngineRequest, OnChunk, Partial
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams

_listener: ContextVar[OnChunk | None] = ContextVar("listener", default=None)


def listener() -> OnChunk | None:
    """The receiver of the tokens of the present call, if there is one."""
    return _listener.get()


@contextmanager
def listening(on_chunk: OnChunk | None) -> Generator[None]:
    """Within the block, calls of a `GenerateFn` report their tokens to `on_chunk`, in order and as early as the
    function streams them."""
    token = _listener.set(on_chunk)
    try:
        yield
    finally:
        _listener.reset(token)


RequestFn = Callable[[EngineRequest, OnChunk | None], Coroutine[Any, Any, Completion]]
"""Function that answers a request and reports its tokens as they come, such as `GeneratorRouter.stream`."""


@dataclass(slots=True)
class Attempt:
    """One attempt at a request, passed to the steps around it. Either generation or one of the steps sets `answer`."""

    request: EngineRequest
    on_chunk: OnChunk | None
    answer: Completion | None = None


Step = Callable[[Attempt], AbstractContextManager[object]]
"""Context manager around an attempt. If a step sets `answer` before it yields, the following steps and generation are
skipped. After it has yielded, it may check or replace the answer."""


@dataclass(eq=False)
class Generation:
    """A `GenerateFn` that passes each request through a list of steps, the first of them outermost.

    It makes an `EngineRequest` of the keyword arguments; the steps and `ask` receive this request.

    Example:

        generate = Generation(router.stream, around_attempt=[journal.step])

    Args:
        ask: Answers a request.
        around_attempt: Steps around each attempt; there are several attempts if `resume` continues a completion.
        ready: Awaited before each attempt.
        resume: Continues aborted completions. By default aborted completions are returned to the caller.
    """

    ask: RequestFn
    _: KW_ONLY
    around_attempt: Sequence[Step] = ()
    ready: Callable[[], Awaitable[object]] | None = None
    resume: Resume | None = None

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        request, on_chunk = EngineRequest(request_id, prompt_token_ids, sampling, session_id), listener()
        if self.resume is None:
            return await self._attempt(request, on_chunk)
        return await self.resume.complete(self._attempt, request, on_chunk)

    async def _attempt(self, request: EngineRequest, on_chunk: OnChunk | None) -> Completion:
        attempt = Attempt(request, on_chunk)
        if self.ready is not None:
            await self.ready()
        with ExitStack() as stack:
            for step in self.around_attempt:
                stack.enter_context(step(attempt))
                if attempt.answer is not None:
                    break
            else:
                attempt.answer = await self.ask(attempt.request, attempt.on_chunk)
        return cast("Completion", attempt.answer)  # the caller checks its type


def request_fn(generate: GenerateFn) -> RequestFn:
    """Adapt a `GenerateFn` to a function of requests. Tokens are reported as early as the function streams them."""

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


@dataclass(eq=False)
class Resume:
    """Continuation of aborted completions, so that callers see whole ones.

    While a completion says ABORT, the request is sent again under the same id, with the tokens so far and the budget
    that remains (see `Partial`). A completion that an undisturbed run would not have continued is returned instead: one
    that ends in a stop token is "stop", one that uses up its budget is "length", and one that had ended before the
    abort reached it keeps its reason. Without any token the original request is sent again.

    `min_tokens` shrinks by the tokens that exist. A seed makes the whole reproducible for the same interruptions:
    later attempts draw from a seed derived from it and from the number of tokens so far, since the same seed would
    repeat its draws. When the rollout's own time is up, its tokens are returned as aborted (`core/calls/stopwatch.py`).

    A completion that waited has the metric `interrupted_s`, in seconds.

    Args:
        wait_until_resumed: Awaited before each further attempt.
        resume_timeout_s: Time limit of each such wait, and of the total wait between consecutive attempts that are
            aborted without a token, which are repeated at growing intervals. After it the completion says ABORT.
        max_attempts: Largest number of requests sent for one completion. If the last one is aborted, the completion
            says ABORT. None sets no limit.
        max_context: Number of tokens of prompt and completion at which a completion ends with "length".

    Raises:
        ValueError: `max_attempts` is less than 1.
    """

    wait_until_resumed: Callable[[], Awaitable[object]] | None = None
    resume_timeout_s: float = 300.0
    max_attempts: int | None = None
    max_context: int | None = None

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}; it must be at least 1")

    async def complete(self, ask: RequestFn, request: EngineRequest, on_chunk: OnChunk | None) -> Completion:
        """The completion of all attempts together. `on_chunk` receives each of its tokens once and in order.

        Raises:
            GenerationError: an attempt streamed other tokens than it returned, or did not return requested routed
                experts.
            TypeError: `ask` returned something other than a completion.
        """
        if self.max_context is not None:
            room = max(1, self.max_context - len(request.prompt_token_ids))
            request = replace(request, sampling=request.sampling.within(room))
        partial, fruitless = Partial(request, on_chunk), _FruitlessAttempts(self.resume_timeout_s)
        loop, interrupted_s = asyncio.get_running_loop(), 0.0
        for attempt in count(1):
            began = loop.time()
            with partial.attempt() as keep:
                part = await ask(partial.rest, None if on_chunk is None else keep)
                _check(part, request)
                completion = partial.add(part)
            if completion.finish_reason is not FinishReason.ABORT:
                break
            if (ended := partial.ended) is not None:
                completion = ended
                break
            if stopwatch.time_is_up():
                break
            aborted = loop.time()
            again = attempt != self.max_attempts and await self._resumed()
            again = again and await fruitless.wait(bool(part.token_ids), since=began)
            interrupted_s += loop.time() - aborted
            if not again:
                break
        if not interrupted_s:
            return completion
        before_s = completion.metrics.get("interrupted_s", 0.0)
        return replace(completion, metrics={**completion.metrics, "interrupted_s": before_s + interrupted_s})

    async def _resumed(self) -> bool:
        """Wait until generation is resumed. Returns False if that takes too long."""
        if self.wait_until_resumed is None:
            return True
        try:
            with stopwatch.paused():
                await bounded(self.wait_until_resumed(), self.resume_timeout_s, "wait_until_resumed")
        except OutOfTimeError:
            return False
        return True


def _check(part: Completion, request: EngineRequest) -> None:
    if not isinstance(part, Completion):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"generate returned {type(part).__name__}; it must return a Completion")
    if request.sampling.return_routed_experts and part.token_ids and part.routed_experts is None:
        raise GenerationError(f"request {request.request_id!r} asked for routed experts, but got none")


class _FruitlessAttempts:
    """Backoff between attempts that are aborted one after the other without a token, to avoid a busy loop."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waited_s = 0.0
        self._in_a_row = 0

    async def wait(self, got_tokens: bool, *, since: float) -> bool:
        """Wait until the next attempt may be made. Returns False if the time limit has passed.

        Args:
            got_tokens: Whether the last attempt returned tokens.
            since: Start of the last attempt, from which the interval is counted.
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
