"""`POST /v1/completions`: text that continues a prompt."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from starlette.requests import Request

from titan_rl.generation.request import tokens_between
from titan_rl.serving import LEAST_LOGPROB
from titan_rl.serving.conversations.caller import Talk, caller_of
from titan_rl.serving.http.errors import UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.http.exchange import Answer, Emit, Exchanges, encoded
from titan_rl.serving.http.request import read
from titan_rl.serving.policy import Ask, ServedPolicy
from titan_rl.serving.protocols.openai.bodies import CompletionBody
from titan_rl.serving.protocols.wire import check_choices, session_id_of, top_by_text, usage, weight_versions
from titan_rl.serving.text import Text, TextReader, Tokenizing
from titan_rl.types import Completion, FinishReason, TokenChunk

MAX_TOKENS = 16
"""Default of `max_tokens` in OpenAI's protocol."""
_CONTEXT = 8
"""Number of tokens of the prompt that may influence the text of the completion."""


class CompletionEndpoint:
    def __init__(
        self,
        policy: ServedPolicy,
        exchanges: Exchanges,
        text: Text | None,
        tokenizing: Tokenizing,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._policy = policy
        self._exchanges = exchanges
        self._text = text
        self._tokenizing = tokenizing
        self._stop_token_ids = stop_token_ids

    def __call__(self, request: Request) -> Answer:
        text = self._text
        if text is None:
            raise ApiError(400, "this server has no tokenizer; ask /inference/v1/generate")
        body = read(request, CompletionBody)
        caller = caller_of(request)
        policy = self._policy.named(body.model)
        if body.echo and body.logprobs is not None:
            message = "echo tells the prompt's text and none of its logprobs; leave logprobs out"
            raise ApiError(400, message, param="echo", code=UNSUPPORTED_VALUE)
        given, num_choices = _given(body), body.n or 1
        num_completions = num_choices * len(given)
        check_choices(num_completions, self._exchanges.limits.num_choices, "n")
        request_id, session_id = f"cmpl-{uuid.uuid4().hex}", session_id_of(request)

        async def work(emit: Emit | None) -> Any:
            num_characters = sum(len(prompt) for prompt in given if isinstance(prompt, str))
            prompts = await self._tokenizing(lambda: [_token_ids(prompt, text) for prompt in given], num_characters)
            sampled = [
                policy.sampling(
                    len(prompt), body.max_tokens or MAX_TOKENS, "prompt", **body.sampling(self._stop_token_ids)
                )
                for prompt in prompts
            ]
            requests: list[tuple[Talk, Ask]] = []
            for at, (prompt, sampling) in enumerate(zip(prompts, sampled, strict=True)):
                talk = caller.talk_in_tokens(prompt, text.decode, session_id)
                requests.append((talk, talk.ask(sampling, num_choices, request_id, first_index=at * num_choices)))
            return await _Work(policy, text, body, requests, request_id)(emit)

        return Answer(self._exchanges, work, num_completions=num_completions, stream=bool(body.stream))


class _Work:
    def __init__(
        self,
        policy: ServedPolicy,
        text: Text,
        body: CompletionBody,
        requests: list[tuple[Talk, Ask]],
        request_id: str,
    ) -> None:
        self._policy = policy
        self._text = text
        self._body = body
        self._requests = requests
        self._envelope = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": policy.model,
        }

    async def __call__(self, emit: Emit | None) -> Any:
        choices = [
            _Choice(self, index, ask.prompt_token_ids, emit)
            for index, ask in enumerate(ask for _, ask in self._requests for _ in range(ask.num_choices))
        ]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._complete(ask, choices[at * ask.num_choices :]))
                    for at, (_, ask) in enumerate(self._requests)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        by_prompt = [task.result() for task in tasks]
        completions = [completion for one in by_prompt for completion in one]
        use = usage(sum(len(ask.prompt_token_ids) for _, ask in self._requests), completions)
        if emit is None:
            choice_bodies = [
                choice.complete(completion) for choice, completion in zip(choices, completions, strict=True)
            ]
            body = encoded({**self._envelope, "choices": choice_bodies, "usage": use})
            self._keep(by_prompt)
            return body
        ends = [encoded(choice.end(completion)) for choice, completion in zip(choices, completions, strict=True)]
        self._keep(by_prompt)
        for end in ends:
            emit(end)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            emit({**self._envelope, "choices": [], "usage": use})
        return None

    async def _complete(self, ask: Ask, choices: list[_Choice]) -> list[Completion]:
        return await self._policy.complete(ask, lambda index, chunk: choices[index].take(chunk))

    def _keep(self, by_prompt: list[list[Completion]]) -> None:
        """Record completions. Called once the answer is encoded, because completions that cannot be sent must not be
        kept."""
        for (talk, _), completions in zip(self._requests, by_prompt, strict=True):
            for index, completion in enumerate(completions):
                talk.record(
                    index, completion, {"role": "assistant", "content": self._text.decode(completion.token_ids)}
                )

    @property
    def body(self) -> CompletionBody:
        return self._body

    @property
    def text(self) -> Text:
        return self._text

    @property
    def envelope(self) -> dict[str, Any]:
        return self._envelope


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
