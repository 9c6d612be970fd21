"""Generator in virtual time that takes many engine steps at once."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from titan_rl.core.arrays import LOGPROBS, TOKENS, NumberArray
from titan_rl.generation.adaptive_batch import AdaptiveLimit, Growth
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.scripted_engine import CostModel
from titan_rl.generation.types import PauseMode
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk, VersionSpan


def some_tokens(count: int) -> NumberArray[int]:
    return NumberArray(array(TOKENS, (0,)) * count)


def some_logprobs(count: int) -> NumberArray[float]:
    return NumberArray(array(LOGPROBS, (0.0,)) * count)


CLOCK_TICK_S = 1e-6  # resolution of virtual time

LengthOf = Callable[[str, int], int]
"""Function of a request's id and its number of context tokens that returns the number of tokens it still generates."""


@dataclass(eq=False, slots=True)
class _Sequence:
    request_id: str
    context: int  # tokens of the prompt, and tokens generated before it was admitted
    left: int  # tokens to generate
    most: int  # most tokens of context and answer
    reason: FinishReason
    future: asyncio.Future[Completion]
    created_at: float
    on_chunk: OnChunk | None = None
    queue_s: float | None = None  # seconds until it first ran
    generated: int = 0
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])

    @property
    def num_tokens(self) -> int:
        return self.context + self.generated

    @property
    def growth(self) -> Growth:
        return Growth(self.context, self.num_tokens, self.most)

    def add(self, count: int, version: int) -> None:
        self.generated += count
        self.left -= count
        if self.spans and self.spans[-1].version == version:
            count += self.spans.pop().num_tokens
        self.spans.append(VersionSpan(version, count))

    def report_chunk(self, count: int, version: int) -> None:
        if self.on_chunk is not None:
            spans = (VersionSpan(version, count),)
            self.on_chunk(TokenChunk(self.request_id, some_tokens(count), some_logprobs(count), spans))

    def resolve(self, reason: FinishReason) -> None:
        if not self.future.done():
            tokens, logprobs = some_tokens(self.generated), some_logprobs(self.generated)
            waited_s = self.future.get_loop().time() - self.created_at if self.queue_s is None else self.queue_s
            metrics = {"queue_s": waited_s}
            self.future.set_result(
                Completion(self.request_id, tokens, logprobs, reason, tuple(self.spans), metrics=metrics)
            )


class SimulatedReplica:
    """A `Replica` that simulates the time of tokens, but not their values.

    It behaves like `ScriptedEngine` behind an `EngineLoop`: waiting requests join between two steps while there is
    room, a step gives each running request a token, and pulls and aborts wait for at most one step. The steps until the
    next request finishes are alike, so they are simulated as one wait, which any event interrupts.

    Args:
        cost: Duration of a step and of a pull, in seconds.
        max_running: Maximum number of requests that advance at a time.
        kv_tokens: Number of tokens that fit the KV cache. When it is full, the request that joined last is preempted,
            and its tokens are computed again later.
        adaptive_limit: Limits how many waiting requests join. By default as many join as there is room for.
        wake_s: Additional duration of the first pull or resume after a pause in mode "sleep", in seconds.
        stream_interval: Maximum number of steps between two chunks of a streamed request. None streams no chunks, which
            makes the simulated waits longer.
    """

    def __init__(
        self,
        name: str,
        length_of: LengthOf,
        cost: CostModel,
        *,
        max_running: int,
        kv_tokens: int,
        adaptive_limit: AdaptiveLimit | None = None,
        wake_s: float = 0.0,
        stream_interval: int | None = None,
    ) -> None:
        self.name = name
        self.version = 0
        self.num_tokens = 0  # computed tokens, including discarded ones
        self.num_preemptions = 0
        self._busy_s = 0.0  # duration of completed steps
        self._busy_since: float | None = None  # start of the steps in progress
        self._length_of = length_of
        self._cost = cost
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._adaptive_limit = adaptive_limit
        self._wake_s, self._asleep = wake_s, False
        self._stream_interval = stream_interval
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # in the order in which they joined
        self._held = 0  # tokens of the running requests in the KV cache
        self._prompt_tokens = 0  # prompt tokens to be computed in the next step
        self._paused = False
        self._aborting: set[str] = set()
        self._pulls: list[tuple[int, asyncio.Future[None]]] = []
        self._changed = asyncio.Event()

    @property
    def busy_s(self) -> float:
        """Seconds spent in steps until now, including those in progress."""
        if self._busy_since is None:
            return self._busy_s
        return self._busy_s + asyncio.get_running_loop().time() - self._busy_since

    @property
    def request_ids(self) -> list[str]:
        """Ids of running and waiting requests, as the router received them."""
        return [sequence.request_id.partition("~")[0] for sequence in (*self._running, *self._waiting)]

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        return await self.stream(EngineRequest(request_id, prompt_token_ids, sampling, session_id))

    async def stream(self, request: EngineRequest, on_chunk: OnChunk | None = None) -> Completion:
        request_id, context = request.request_id, len(request.prompt_token_ids)
        left, most = self._length_of(request_id, context), request.sampling.max_tokens
        reason = FinishReason.STOP if left < most else FinishReason.LENGTH
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        sequence = _Sequence(
            request_id, context, min(left, most), context + most, reason, future, loop.time(), on_chunk
        )
        self._waiting.append(sequence)
        self._changed.set()
        try:
            return await future
        finally:
            if not future.done() or future.cancelled():
                await self.abort([request_id])

    async def pull(self, version: int) -> int:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pulls.append((version, done))
        self._changed.set()
        await done
        return self.version

    async def pause(self, mode: PauseMode) -> None:
        self._paused, self._asleep = True, mode is PauseMode.SLEEP
        self._changed.set()

    async def resume(self) -> None:
        self._paused = False
        self._changed.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._aborting.update(request_ids)
        self._changed.set()

    async def close(self) -> None: ...

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._changed.clear()
            self._abort()
            if self._asleep and (self._pulls or not self._paused):
                self._asleep = False
                await asyncio.sleep(self._wake_s)
            await self._pull()
            if not self._paused:
                self._admit()
            if self._changed.is_set():
                continue
            if self._paused or not self._running:
                await self._changed.wait()
            else:
                await self._advance()

    def _abort(self) -> None:
        if not self._aborting:
            return
        for sequence in [*self._waiting, *self._running]:
            if sequence.request_id in self._aborting:
                sequence.resolve(FinishReason.ABORT)
                self._left(sequence, was_aborted=True)
        self._waiting = deque(s for s in self._waiting if s.request_id not in self._aborting)
        self._running = [s for s in self._running if s.request_id not in self._aborting]
        self._held = sum(sequence.num_tokens for sequence in self._running)
        self._aborting.clear()

    async def _pull(self) -> None:
        while self._pulls:
            pulls, self._pulls = self._pulls, []
            await asyncio.sleep(self._cost.load)
            self.version = max(self.version, *(version for version, _ in pulls))
            for _, done in pulls:
                if not done.done():  # otherwise the caller was cancelled
                    done.set_result(None)

    def _admit(self) -> None:
        """Preempt requests until the step has room, then let requests join, first those that were preempted."""
        while len(self._running) > 1 and self._room() < len(self._running):
            self._waiting.appendleft(last := self._running.pop())
            self._held -= last.num_tokens
            self.num_preemptions += 1
        if not self._waiting:
            return
        room = self._room()
        for _ in range(self._num_joining()):
            context = self._waiting[0].num_tokens
            if self._running and room - context <= len(self._running):
                break
            room -= context
            self._held += context
            self._prompt_tokens += context
            self._running.append(self._waiting.popleft())

    def _num_joining(self) -> int:
        if self._adaptive_limit is None:
            return min(len(self._waiting), self._max_running - len(self._running))
        return self._adaptive_limit.num_joining([s.growth for s in self._running], (s.growth for s in self._waiting))

    async def _advance(self) -> None:
        """Take the steps up to the next change."""
        most = self._steps_alike()
        loop = asyncio.get_running_loop()
        self._busy_since = began = loop.time()
        for sequence in self._running:
            if sequence.queue_s is None:
                sequence.queue_s = began - sequence.created_at
        seconds_of = self._seconds_of()
        try:
            async with asyncio.timeout_at(began + seconds_of(most)):
                await self._changed.wait()
        except TimeoutError:
            steps = most
        else:
            passed = loop.time() - began - CLOCK_TICK_S
            steps = 1 + bisect_left(range(1, most), passed, key=seconds_of)
        await asyncio.sleep(max(0.0, began + seconds_of(steps) - loop.time()))
        self._busy_s, self._busy_since = self.busy_s, None
        self._take(steps)

    def _steps_alike(self) -> int:
        count = len(self._running)
        steps = min(sequence.left for sequence in self._running)
        if count > 1:
            steps = min(steps, self._room() // count)
        return steps if self._stream_interval is None else min(steps, self._stream_interval)

    def _seconds_of(self) -> Callable[[int], float]:
        """Return a function from a number of steps to their duration in seconds. The first step also computes
        prompts."""
        count, cost = len(self._running), self._cost
        each = cost.step_seconds(count, 0, self._held)
        growth = cost.context_token * count / 2
        prompts = cost.prompt_token * self._prompt_tokens
        return lambda steps: prompts + steps * (each + growth * (steps - 1))

    def _take(self, steps: int) -> None:
        """Give every running request a token for each step."""
        self.num_tokens += steps * len(self._running)
        self._held += steps * len(self._running)
        self._prompt_tokens = 0
        for sequence in self._running:
            sequence.add(steps, self.version)
            if self._stream_interval is not None and sequence.left:
                sequence.report_chunk(steps, self.version)
            if sequence.left == 0:
                self._held -= sequence.num_tokens
                sequence.resolve(sequence.reason)
                self._left(sequence, was_aborted=False)
        self._running = [sequence for sequence in self._running if sequence.left]

    def _left(self, sequence: _Sequence, *, was_aborted: bool) -> None:
        if self._adaptive_limit is not None:
            self._adaptive_limit.ended(sequence.growth, was_aborted=was_aborted)

    def _room(self) -> int:
        """Number of free tokens in the KV cache."""
        return self._kv_tokens - self._held
