"""Replicas in virtual time with one step per second, and requests whose tokens are known beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import looptime

from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router import GeneratorRouter, Limits, RoundRobin
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk, VersionSpan

PROMPT = [3, 1, 4]
LIMITS = Limits(abort_s=20, no_replica_s=100, paused_s=500, reabort_interval_s=2)


class SteppingReplica:
    """Scripted engine in virtual time with one step per second, which streams every `INTERVAL` steps."""

    INTERVAL = 4  # steps between two chunks

    def __init__(self, name: str, *, hears_after_s: float = 0.0) -> None:
        self.name = name
        self.served: list[str] = []
        self.prefilled: list[int] = []  # prompt tokens of each request
        self.dead = False
        self.fails_after: int | None = None  # tokens of each attempt before it fails
        self.pull_s = 0.0
        self.hears_after_s = hears_after_s  # delay before a request can be aborted
        self._version = 0
        self._going = asyncio.Event()
        self._going.set()
        self._aborted: dict[str, asyncio.Event] = {}

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        raise AssertionError("the router must call stream() instead")

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        assert request.request_id not in self._aborted, "duplicate id"
        self.served.append(request.request_id)
        self.prefilled.append(len(request.prompt_token_ids))
        engine = ScriptedEngine(version=self._version)
        engine.add(request)
        await asyncio.sleep(self.hears_after_s)
        aborted = self._aborted[request.request_id] = asyncio.Event()
        tokens, logprobs, versions = list[int](), list[float](), list[int]()
        num_streamed, reason = 0, None
        try:
            while reason is None:
                await asyncio.sleep(1.0)
                await self._going_or(aborted)
                if self.dead:
                    raise ConnectionError(f"{self.name} is dead")
                if aborted.is_set():
                    reason = FinishReason.ABORT
                    break
                if engine.versions[-1] != self._version:
                    engine.load_state_dict([], self._version)
                (delta,) = engine.step()
                tokens += delta.token_ids
                logprobs += delta.logprobs
                versions += [self._version] * len(delta.token_ids)
                reason = delta.finish_reason
                if len(tokens) == self.fails_after:
                    raise ConnectionError(f"{self.name} fails")
                if reason is None and len(tokens) - num_streamed >= self.INTERVAL:
                    spans = _spans(versions[num_streamed:])
                    on_chunk(TokenChunk(request.request_id, tokens[num_streamed:], logprobs[num_streamed:], spans))
                    num_streamed = len(tokens)
        finally:
            del self._aborted[request.request_id]
        return Completion(request.request_id, tokens, logprobs, reason, _spans(versions))

    async def _going_or(self, aborted: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(self._going.wait()), asyncio.ensure_future(aborted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def pull(self, version: int) -> None:
        self._check()
        await asyncio.sleep(self.pull_s)
        self._version = version

    async def pause(self, mode: str) -> None:
        self._check()
        self._going.clear()

    async def resume(self) -> None:
        self._check()
        self._going.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._check()
        for request_id in request_ids:
            if request_id in self._aborted:
                self._aborted[request_id].set()

    async def close(self) -> None: ...

    def _check(self) -> None:
        if self.dead:
            raise ConnectionError(f"{self.name} is dead")


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version, versions.count(version)) for version in dict.fromkeys(versions))


def undisturbed(num_tokens: int, version: int = 0) -> tuple[list[int], list[float]]:
    engine = ScriptedEngine(version=version)
    engine.add(EngineRequest("r", PROMPT, SamplingParams(max_tokens=num_tokens)))
    deltas = [engine.step()[0] for _ in range(num_tokens)]
    return [token for one in deltas for token in one.token_ids], [value for one in deltas for value in one.logprobs]


class Asked:
    """Requests to a router, with the tokens streamed before each answer."""

    def __init__(self, router: GeneratorRouter) -> None:
        self._router = router
        self.streamed: dict[str, list[int]] = {}
        self.answers: dict[str, asyncio.Task[Completion]] = {}

    def ask(self, request_id: str, num_tokens: int, seed: int | None = None) -> None:
        streamed = self.streamed[request_id] = []
        sampling = SamplingParams(max_tokens=num_tokens, seed=seed)
        request = EngineRequest(request_id, PROMPT, sampling, request_id.rpartition("/")[0])
        stream = self._router.stream(request, lambda chunk: streamed.extend(chunk.token_ids))
        self.answers[request_id] = asyncio.ensure_future(stream)

    async def all(self) -> dict[str, Completion]:
        return dict(zip(self.answers, await asyncio.gather(*self.answers.values()), strict=True))

    def check(self, completion: Completion, num_tokens: int) -> None:
        tokens, _ = undisturbed(num_tokens)
        assert list(completion.token_ids) == tokens[: len(completion.token_ids)]
        assert sum(span.num_tokens for span in completion.version_spans) == len(completion.token_ids)
        streamed = self.streamed[completion.request_id]
        assert streamed == tokens[: len(streamed)]
        assert len(streamed) <= len(completion.token_ids)


def in_virtual_time(scenario: Callable[[], Awaitable[None]]) -> None:
    loop = looptime.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(scenario(), 20_000))
    finally:
        loop.close()


def routed(
    *replicas: SteppingReplica, below: float | None = 0.5, in_turn: bool = False, max_attempts: int = 50
) -> GeneratorRouter:
    """
    Args:
        in_turn: Route requests in turn; otherwise a session stays on its replica.
    """
    strategy = RoundRobin() if in_turn else None
    return GeneratorRouter(
        replicas, strategy, stall_timeout_s=60, limits=LIMITS, move_below=below, max_attempts=max_attempts
    )


def ask_two_replicas(asked: Asked, long: int = 40, short: int = 4) -> None:
    """Submit five long requests to one replica, the first the longest, and five short ones to the other."""
    for place in range(5):
        asked.ask(f"long/{place}/0", long if place else 60)
        asked.ask(f"short/{place}/0", short)
