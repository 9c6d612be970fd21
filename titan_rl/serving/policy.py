"""The served policy: token streams that no abort interrupts, and the completions of a request."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from titan_rl.core.calls.cancellation import cancel_requested, gather_or_cancel
from titan_rl.generation.continuation import RequestFn, Resume
from titan_rl.generation.request import EngineRequest, OnChunk, Partial, tokens_between
from titan_rl.serving.http.errors import UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.http.exchange import ServerMetrics
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk


def uninterrupted(stream: RequestFn, *, wait_until_resumed: Callable[[], Awaitable[object]] | None = None) -> RequestFn:
    """Wrap `stream` so that callers get complete completions in spite of aborts, and every token in a chunk; see
    `Resume`.

    Raises:
        GenerationError: An answer differs from the tokens that were streamed.
    """
    return functools.partial(Resume(wait_until_resumed).complete, stream)


class Versions(Protocol):
    """Other policies of the server under their own names: versions of the served policy, or adapters."""

    def names(self) -> Sequence[str]:
        """Names of all policies, for `/v1/models`."""
        ...

    def version_of(self, name: str) -> int | None:
        """Version of the weights that answer new requests under a name; None if it is unknown."""
        ...

    def stream_of(self, name: str | None) -> RequestFn | None:
        """Return the generation function of a policy; None if the name is unknown. `None` is the served policy's
        name."""
        ...


OnTokens = Callable[[int, TokenChunk], int | None]
"""Callback with the index of a completion and its next tokens. Returns None if the completion continues. If it ends
within these tokens, returns how many of them belong to it."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Request for completions of one prompt.

    Args:
        num_choices: Number of completions. With a seed, each completion gets its own.
        stream: Generates the completions; None is the server's policy.
        scope: Context manager that is entered during generation.
    """

    prompt_token_ids: Sequence[int]  # [num_prompt_tokens]
    sampling: SamplingParams
    num_choices: int
    session_id: str | None
    request_id: str
    stream: RequestFn | None = None
    scope: Callable[[], AbstractAsyncContextManager[object]] = nullcontext

    def sampling_of(self, index: int) -> SamplingParams:
        """Return the sampling parameters of the completion with this index."""
        sampling = self.sampling
        return sampling if sampling.seed is None or not index else replace(sampling, seed=sampling.seed + index)


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """Policy of a server under one name, with the metrics of its completions.

    Args:
        model: Name by which clients know it.
        stream: Generates completions that no abort interrupts; see `uninterrupted`.
        max_context: Maximum number of tokens of prompt and completion together.
        any_model: Whether it also answers under all unknown names.
        versions: Other policies, which answer under their own names.
        created: Time of creation, in seconds since 1970.
    """

    model: str
    stream: RequestFn
    max_context: int
    metrics: ServerMetrics
    any_model: bool = False
    versions: Versions | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def named(self, name: str | None) -> ServedPolicy:
        """Return the policy of this name: this one, or another of the server. None is this one.

        Raises:
            ApiError: With status 404 if there is none of this name.
        """
        if name is None or name == self.model:
            return self
        if self.versions is not None and (stream := self.versions.stream_of(name)) is not None:
            return ServedPolicy(name, uninterrupted(stream), self.max_context, self.metrics)
        if self.any_model:
            return self
        names = [self.model, *(() if self.versions is None else self.versions.names())]
        message = f"there is no model of this name; this server has {', '.join(map(repr, names))}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def sampling(self, num_prompt_tokens: int, max_tokens: int | None, param: str, **given: object) -> SamplingParams:
        """Make sampling parameters with a budget of `max_tokens`, limited by the room in the context.

        Args:
            max_tokens: Requested number of tokens. None takes all the room.
            param: Name of the field that contains the prompt, for errors.

        Raises:
            ApiError: With status 400 if the prompt is empty or fills the context, or values contradict each other.
        """
        room = self.max_context - num_prompt_tokens
        if not num_prompt_tokens:
            raise ApiError(400, "the prompt is empty", param=param)
        if room < 1:
            message = f"the prompt has {num_prompt_tokens} tokens, and the context {self.max_context}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        try:
            return SamplingParams(room if max_tokens is None else max_tokens, **given).within(room)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            message = str(error).removeprefix("SamplingParams.")
            raise ApiError(400, message, param=message.partition(" ")[0]) from None

    async def complete(self, request: CompletionRequest, on_tokens: OnTokens | None = None) -> list[Completion]:
        """Generate all completions of a request at once. If one fails, the others are cancelled.

        Returns:
            Completions, none of them aborted.  # [num_choices]

        Raises:
            ApiError: With status 503 if an interruption outlasted its limits.
            TitanRLError: Generation failed.
        """
        self.metrics.prompt_tokens.inc(len(request.prompt_token_ids))
        unique = f"{request.request_id}-{uuid.uuid4().hex[:12]}"
        choices = [
            EngineRequest(f"{unique}-{index}", request.prompt_token_ids, request.sampling_of(index), request.session_id)
            for index in range(request.num_choices)
        ]
        stream = request.stream or self.stream
        async with request.scope():
            return await gather_or_cancel(
                [self._complete_one(index, choice, stream, on_tokens) for index, choice in enumerate(choices)]
            )

    async def _complete_one(
        self, index: int, request: EngineRequest, stream: RequestFn, on_tokens: OnTokens | None
    ) -> Completion:
        began = time.monotonic()
        observe = self._observe_first_token(began)
        if on_tokens is None:
            return self._done(began, await stream(request, observe), request.sampling)
        partial, is_cut = Partial(request), False
        failure: Exception | None = None

        def on_chunk(chunk: TokenChunk) -> None:
            nonlocal is_cut, failure
            if is_cut:
                return
            observe(chunk)
            try:
                _check_requested_outputs(request.sampling, chunk)
                end = on_tokens(index, chunk)
            except Exception as error:  # not the fault of the replica that sends the chunk
                failure, end = error, 0
            if end is not None:
                is_cut, chunk = True, tokens_between(chunk, 0, end)
                task.cancel()
            keep(chunk)

        with partial.attempt() as keep:
            task = asyncio.create_task(stream(request, on_chunk))
            try:
                completion = await task
            except asyncio.CancelledError:
                if not is_cut or cancel_requested():
                    raise
                completion = None
        if failure is not None:
            raise failure
        if completion is None or is_cut:
            completion = replace(partial.so_far, finish_reason=FinishReason.STOP)
        return self._done(began, completion, request.sampling)

    def _observe_first_token(self, began: float) -> OnChunk:
        is_first = True

        def on_chunk(chunk: TokenChunk) -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                self.metrics.first_token_s.observe(time.monotonic() - began)

        return on_chunk

    def _done(self, began: float, completion: Completion, sampling: SamplingParams) -> Completion:
        if completion.finish_reason is FinishReason.ABORT:
            raise ApiError(503, "generation was interrupted for too long; try again", headers={"retry-after": "1"})
        _check_requested_outputs(sampling, completion)
        self.metrics.completion_tokens.inc(len(completion.token_ids))
        self.metrics.completion_s.observe(time.monotonic() - began)
        return completion


def _check_requested_outputs(sampling: SamplingParams, given: Completion | TokenChunk) -> None:
    """Check that everything that was requested has been generated.

    Raises:
        ApiError: With status 400 if the generator returns no logprobs of other tokens or of prompts, or cannot apply
            constraints.
    """
    if sampling.top_logprobs and given.token_ids and given.top_logprobs is None:
        raise ApiError(
            400, "the generator behind this server returns only the logprobs of sampled tokens", param="top_logprobs"
        )
    if sampling.prompt_logprobs is not None and isinstance(given, Completion) and given.prompt_scores is None:
        raise ApiError(400, "the generator behind this server returns no prompt logprobs", param="prompt_logprobs")
    if sampling.constraint is not None and given.token_ids and given.allowed_logprobs is None:
        message = "the generator behind this server cannot enforce a JSON schema or force tool calls; leave these out"
        raise ApiError(400, message, code=UNSUPPORTED_VALUE)
