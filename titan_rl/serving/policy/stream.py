"""Generation that is heard of before it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from titan_rl.generation.listening import listening, told_whole
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.resume import resume_on_abort
from titan_rl.types import Completion, GenerateFn, SamplingParams


class StreamFn(Protocol):
    """A `GenerateFn` that tells of tokens as they come: `GeneratorRouter.stream` is one.

    The completion holds all tokens, told or not. Nothing is told after the call has ended.
    """

    async def __call__(self, request: EngineRequest, on_chunk: OnChunk) -> Completion: ...


def in_one_piece(generate: GenerateFn) -> StreamFn:
    """A `GenerateFn` as a `StreamFn` that tells of nothing before it ends."""

    async def stream(request: EngineRequest, on_chunk: OnChunk) -> Completion:
        return await request.sent_to(generate)

    return stream


def listened_to(generate: GenerateFn) -> StreamFn:
    """A `GenerateFn` as a `StreamFn` that tells of what comes from the router behind it, as it comes."""

    async def stream(request: EngineRequest, on_chunk: OnChunk) -> Completion:
        with listening(on_chunk):
            return await request.sent_to(generate)

    return stream


def unbroken(stream: StreamFn, *, wait_until_resumed: Callable[[], Awaitable[object]] | None = None) -> StreamFn:
    """Wrap `stream` so that its callers see whole completions, as with `resume_on_abort`, and are told of every token.

    Raises:
        GenerationError: an answer has other tokens than were told of it.
    """

    async def whole(request: EngineRequest, on_chunk: OnChunk) -> Completion:
        async def attempt(
            prompt_token_ids: Sequence[int], *, request_id: str, session_id: str | None = None, sampling: SamplingParams
        ) -> Completion:
            asked = EngineRequest(request_id, prompt_token_ids, sampling, session_id)
            return await told_whole(lambda tell: stream(asked, tell), on_chunk)

        return await request.sent_to(resume_on_abort(attempt, wait_until_resumed=wait_until_resumed))

    return whole
