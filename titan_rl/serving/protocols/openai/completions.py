"""`POST /v1/completions`: text that continues a prompt."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.requests import Request

from titan_rl.core.calls.cancellation import gather_or_cancel
from titan_rl.generation.request import tokens_between
from titan_rl.serving import LEAST_LOGPROB
from titan_rl.serving.conversations.caller import CallerPrompt, caller_of
from titan_rl.serving.http.errors import UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.http.exchange import Answer, Emit, encoded
from titan_rl.serving.http.request import read
from titan_rl.serving.policy import CompletionRequest, ServedPolicy
from titan_rl.serving.protocols.openai.bodies import CompletionBody
from titan_rl.serving.protocols.wire import Backend, session_id_of, top_by_text, usage, weight_versions
from titan_rl.serving.text import Text, TextReader
from titan_rl.types import Completion, FinishReason, TokenChunk

MAX_TOKENS = 16
"""Default of `max_tokens` in OpenAI's protocol."""
_CONTEXT = 8
"""Number of tokens of the prompt that may influence the text of the completion."""


def answer_completions(backend: Backend, request: Request) -> Answer:
    """Answer `POST /v1/completions`."""
    text = backend.text
    if text is None:
        raise ApiError(400, "this server has no tokenizer; use /inference/v1/generate")
    body = read(request, CompletionBody)
    caller = caller_of(request)
    policy = backend.policy.named(body.model)
    if body.echo and body.logprobs is not None:
        message = "echo returns the prompt's text without logprobs; leave logprobs out"
        raise ApiError(400, message, param="echo", code=UNSUPPORTED_VALUE)
    given, num_choices = _given(body), body.n or 1
    num_completions = num_choices * len(given)
    backend.check_choices(num_completions, "n")
    request_id, session_id = f"cmpl-{uuid.uuid4().hex}", session_id_of(request)

    async def work(emit: Emit | None) -> Any:
        num_characters = sum(len(prompt) for prompt in given if isinstance(prompt, str))
        tokenized = await backend.tokenizing(lambda: [_token_ids(prompt, text) for prompt in given], num_characters)
        fields, max_tokens = body.sampling(backend.stop_token_ids), body.max_tokens or MAX_TOKENS
        sampled = [policy.sampling(len(token_ids), max_tokens, "prompt", **fields) for token_ids in tokenized]
        prompts: list[CallerPrompt] = []
        requests: list[CompletionRequest] = []
        for token_ids, sampling in zip(tokenized, sampled, strict=True):
            prompt = caller.prompt_of_tokens(token_ids, backend.show, session_id)
            first_index = num_choices * len(requests)
            requests.append(prompt.request(sampling, num_choices, request_id, first_index))
            prompts.append(prompt)
        return await _Work(backend, policy, text, body, prompts, requests)(emit)

    return Answer(backend.exchanges, work, num_completions=num_completions, stream=bool(body.stream))


@dataclass(frozen=True)
class _Work:
    """Answer to one request, at once or as events."""

    backend: Backend
    policy: ServedPolicy
    text: Text
    body: CompletionBody
    prompts: Sequence[CallerPrompt]
    requests: Sequence[CompletionRequest]

    @cached_property
    def envelope(self) -> dict[str, Any]:
        request_id, created = self.requests[0].request_id, int(time.time())
        return {"id": request_id, "object": "text_completion", "created": created, "model": self.policy.model}

    async def __call__(self, emit: Emit | None) -> Any:
        prompts_of_choices = [one.prompt_token_ids for one in self.requests for _ in range(one.num_choices)]
        choices = [_Choice(self, index, prompt, emit) for index, prompt in enumerate(prompts_of_choices)]
        by_prompt = await gather_or_cancel(
            [self._complete(one, choices[at * one.num_choices :]) for at, one in enumerate(self.requests)]
        )
        completions = [completion for several in by_prompt for completion in several]
        use = usage(sum(len(one.prompt_token_ids) for one in self.requests), completions)
        if emit is None:
            choice_bodies = [
                choice.complete(completion) for choice, completion in zip(choices, completions, strict=True)
            ]
            body = encoded({**self.envelope, "choices": choice_bodies, "usage": use})
            self._record(by_prompt)
            return body
        ends = [encoded(choice.end(completion)) for choice, completion in zip(choices, completions, strict=True)]
        self._record(by_prompt)
        for end in ends:
            emit(end)
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            emit({**self.envelope, "choices": [], "usage": use})
        return None

    async def _complete(self, request: CompletionRequest, choices: list[_Choice]) -> list[Completion]:
        return await self.policy.complete(request, lambda index, chunk: choices[index].take(chunk))

    def _record(self, by_prompt: list[list[Completion]]) -> None:
        for prompt, completions in zip(self.prompts, by_prompt, strict=True):
            self.backend.record(prompt, completions)


class _Choice:
    """One completion, which is reported as it comes."""

    def __init__(self, work: _Work, index: int, prompt_token_ids: Any, emit: Emit | None) -> None:
        self._work = work
        self._index = index
        self._prompt_token_ids = list(prompt_token_ids)
        self._emit = emit
        self._reader = TextReader(work.text.decode, work.body.stops, self._prompt_token_ids[-_CONTEXT:])
        self._pieces: list[str] = []
        self._offset = 0  # position of the next token in the text
        self._is_first = True
        self._echo = work.text.decode(self._prompt_token_ids) if work.body.echo else ""

    def take(self, chunk: TokenChunk) -> int | None:
        piece, count = self._reader.add(chunk.token_ids)
        piece, self._echo = self._echo + piece, ""
        self._pieces.append(piece)
        if self._emit is not None:
            self._emit_chunk(piece, chunk, count)
        return count if self._reader.stop is not None else None

    def complete(self, completion: Completion) -> dict[str, Any]:
        text = "".join(self._pieces) + self._reader.end()
        return {**self._choice_fields(text, completion, len(completion.token_ids)), **self._ending(completion)}

    def end(self, completion: Completion) -> dict[str, Any]:
        """Make the last event."""
        choice = {"index": self._index, "text": self._reader.end(), "logprobs": None, **self._ending(completion)}
        return {**self._work.envelope, "choices": [choice]}

    def _ending(self, completion: Completion) -> dict[str, Any]:
        """Make the fields of the end. Called after the text has ended, because a stop string may end in its last
        character."""
        reason = completion.finish_reason if self._reader.stop is None else FinishReason.STOP
        return {"finish_reason": str(reason), "weight_versions": weight_versions(completion)}

    def _emit_chunk(self, piece: str, chunk: TokenChunk, count: int) -> None:
        assert self._emit is not None
        body = self._work.body
        if piece or body.logprobs is not None or body.return_token_ids:
            choice = {**self._choice_fields(piece, chunk, count), "finish_reason": None}
            self._emit({**self._work.envelope, "choices": [choice]})

    def _choice_fields(self, text: str, tokens: Completion | TokenChunk, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": self._index, "text": text, "logprobs": None}
        kept = tokens_between(tokens, 0, count)
        token_ids = list(kept.token_ids)
        if self._work.body.logprobs is not None:
            shown = [self._work.text.piece(token_id) for token_id in token_ids]
            offsets: list[int] = []
            for one in shown:
                offsets.append(self._offset)
                self._offset += len(one)
            fields["logprobs"] = {
                "tokens": shown,
                "token_logprobs": [max(logprob, LEAST_LOGPROB) for logprob in kept.logprobs],
                "top_logprobs": top_by_text(self._work.text, kept),
                "text_offset": offsets,
            }
        if self._work.body.return_token_ids:
            fields["token_ids"] = token_ids
            if self._is_first:
                fields["prompt_token_ids"] = self._prompt_token_ids
            self._is_first = False
        return fields


def _given(body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts, each as it was given."""
    given: Any = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt is empty", param="prompt")
    return [given] if isinstance(given[0], int) else given


def _token_ids(prompt: str | list[int], text: Text) -> list[int]:
    return text.encode(prompt) if isinstance(prompt, str) else prompt
