"""A generator in virtual time, which takes many engine steps at once."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.scripted_engine import CostModel
from titan_rl.generation.types import PauseMode
from titan_rl.simulate.tokens import Repeated
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk, VersionSpan

CLOCK_TICK_S = 1e-6  # what virtual time is rounded to

LengthOf = Callable[[str, int], int]
"""Tokens that request `request_id` still generates after a context of so many tokens."""


@dataclass(eq=False, slots=True)
class _Sequence:
    request_id: str
    context: int  # tokens of the prompt and of what was generated before it was admitted
    left: int  # tokens to generate
    reason: FinishReason
    future: asyncio.Future[Completion]
    created_at: float
    on_chunk: OnChunk | None = None
    queue_s: float | None = None  # until it first ran
    generated: int = 0
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])

    def add(self, count: int, version: int) -> None:
        self.generated += count
        self.left -= count
        if self.spans and self.spans[-1].version == version:
            count += self.spans.pop().num_tokens
        self.spans.append(VersionSpan(version, count))

    def tell(self, count: int, version: int) -> None:
        if self.on_chunk is not None:
            tokens, logprobs = Repeated(0, count), Repeated(0.0, count)
            self.on_chunk(TokenChunk(self.request_id, tokens, logprobs, (VersionSpan(version, count),)))

    def resolve(self, reason: FinishReason) -> None:
        if not self.future.done():
            tokens, logprobs = Repeated(0, self.generated), Repeated(0.0, self.generated)
            waited_s = self.future.get_loop().time() - self.created_at if self.queue_s is None else self.queue_s
            metrics = {"queue_s": waited_s}
            self.future.set_result(
                Completion(self.request_id, tokens, logprobs, reason, tuple(self.spans), metrics=metrics)
            )


class SimulatedReplica:
    """A `Replica` whose tokens have a cost and no value.

    It does what `ScriptedEngine` does behind an `EngineLoop`: waiting requests join between two steps while there is
    room, a step gives each running request a token, pulls and aborts wait for one step at most. The steps up to the
    next request that finishes differ in nothing, so they are taken as one wait, cut short by whatever comes.

    Args:
        cost: seconds of a step and of a pull.
        max_running: requests that advance at a time.
        kv_tokens: tokens that the KV cache holds. When it is full the request that joined last waits again, and its
            tokens are computed anew.
        wake_s: seconds that the first pull or resume takes longer after a pause in mode "sleep".
        stream_interval: most steps between two times that the running requests are told of their tokens; None tells
            of none, so that more steps are one wait.
    """

    def __init__(
        self,
        name: str,
        length_of: LengthOf,
        cost: CostModel,
        *,
        max_running: int,
        kv_tokens: int,
        wake_s: float = 0.0,
        stream_interval: int | None = None,
    ) -> None:
        self.name = name
        self.version = 0
        self.busy_s = 0.0  # time spent in steps
        self.num_tokens = 0  # computed, also those that came to nothing
        self._length_of = length_of
        self._cost = cost
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._wake_s = wake_s
        self._asleep = False
        self._stream_interval = stream_interval
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # in the order in which they joined
        self._prompt_tokens = 0  # to be computed in the next step
        self._paused = False
        self._aborting: set[str] = set()
        self._pulls: list[tuple[int, asyncio.Future[None]]] = []
        self._changed = asyncio.Event()

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
        request_id, num_prompt_tokens = request.request_id, len(request.prompt_token_ids)
        left, most = self._length_of(request_id, num_prompt_tokens), request.sampling.max_tokens
        reason = FinishReason.STOP if left < most else FinishReason.LENGTH
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        sequence = _Sequence(request_id, num_prompt_tokens, min(left, most), reason, future, loop.time(), on_chunk)
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
        self._waiting = deque(s for s in self._waiting if s.request_id not in self._aborting)
        self._running = [s for s in self._running if s.request_id not in self._aborting]
        self._aborting.clear()

    async def _pull(self) -> None:
        while self._pulls:
            pulls, self._pulls = self._pulls, []
            await asyncio.sleep(self._cost.load)
            self.version = max(self.version, *(version for version, _ in pulls))
            for _, done in pulls:
                done.set_result(None)

    def _admit(self) -> None:
        while len(self._running) > 1 and self._room() < len(self._running):
            self._waiting.appendleft(self._running.pop())
        room = self._room()
        while self._waiting and len(self._running) < self._max_running:
            context = self._waiting[0].context + self._waiting[0].generated
            if self._running and room - context <= len(self._running):
                break
            room -= context
            self._prompt_tokens += context
            self._running.append(self._waiting.popleft())

    async def _advance(self) -> None:
        """Take the steps up to the next one at which something changes."""
        count = len(self._running)
        steps = min(sequence.left for sequence in self._running)
        if count > 1:
            steps = min(steps, self._room() // count)
        if self._stream_interval is not None:
            steps = min(steps, self._stream_interval)
        first = self._cost.step_seconds(count, self._prompt_tokens)
        each = self._cost.step_seconds(count, 0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for sequence in self._running:
            if sequence.queue_s is None:
                sequence.queue_s = began - sequence.created_at
        try:
            async with asyncio.timeout_at(began + first + (steps - 1) * each):
                await self._changed.wait()
        except TimeoutError:
            pass
        else:
            more = (loop.time() - began - first - CLOCK_TICK_S) / each if each else 0.0
            steps = min(steps, 1 + max(0, math.ceil(more)))
        seconds = first + (steps - 1) * each
        await asyncio.sleep(max(0.0, began + seconds - loop.time()))
        self.busy_s += seconds
        self.num_tokens += steps * count
        self._prompt_tokens = 0
        for sequence in self._running:
            sequence.add(steps, self.version)
            if self._stream_interval is not None and sequence.left:
                sequence.tell(steps, self.version)
            if sequence.left == 0:
                sequence.resolve(sequence.reason)
        self._running = [sequence for sequence in self._running if sequence.left]

    def _room(self) -> int:
        """Tokens that the KV cache has free."""
        return self._kv_tokens - sum(sequence.context + sequence.generated for sequence in self._running)
