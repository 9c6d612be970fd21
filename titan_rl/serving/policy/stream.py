"""Generation that is heard of before it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from titan_rl.errors import GenerationError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.resume import resume_on_abort
from titan_rl.types import Completion, GenerateFn, SamplingParams, TokenChunk, VersionSpan


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


def unbroken(stream: StreamFn, *, wait_until_resumed: Callable[[], Awaitable[object]] | None = None) -> StreamFn:
    """Wrap `stream` so that its callers see whole completions, as with `resume_on_abort`, and are told of every token.

    Raises:
        GenerationError: an answer has other tokens than were told of it.
    """

    async def whole(request: EngineRequest, on_chunk: OnChunk) -> Completion:
        async def attempt(
            prompt_token_ids: Sequence[int], *, request_id: str, session_id: str | None = None, sampling: SamplingParams
        ) -> Completion:
            told: list[int] = []

            def tell(chunk: TokenChunk) -> None:
                if chunk.token_ids:
                    told.extend(chunk.token_ids)
                    on_chunk(chunk)

            completion = await stream(EngineRequest(request_id, prompt_token_ids, sampling, session_id), tell)
            if list(completion.token_ids[: len(told)]) != told:
                raise GenerationError(f"request {request_id!r} was answered with other tokens than it had streamed")
            if len(told) < len(completion.token_ids):
                on_chunk(tokens_between(completion, len(told), len(completion.token_ids)))
            return completion

        return await request.sent_to(resume_on_abort(attempt, wait_until_resumed=wait_until_resumed))

    return whole


def tokens_between(tokens: Completion | TokenChunk, start: int, stop: int) -> TokenChunk:
    """The tokens [start, stop).

    Example: tokens 2 to 4 of those with the spans (6, 3), (7, 2) have the spans (6, 1), (7, 1).
    """
    spans: list[VersionSpan] = []
    position = 0
    for span in tokens.version_spans:
        num_tokens = min(stop, position + span.num_tokens) - max(start, position)
        if num_tokens > 0:
            spans.append(VersionSpan(span.version, num_tokens))
        position += span.num_tokens
    experts = tokens.routed_experts
    return TokenChunk(
        tokens.request_id,
        tokens.token_ids[start:stop],
        tokens.logprobs[start:stop],
        tuple(spans),
        None if experts is None else experts[start:stop],
    )
