"""`POST /v1/chat/completions`: messages in, a message out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from titan_rl.serving.conversations.caller import caller_of
from titan_rl.serving.conversations.constraint import Constraint
from titan_rl.serving.conversations.reply import Delta, Reply
from titan_rl.serving.conversations.turn import ServedTurn, TurnRequest
from titan_rl.serving.http.errors import ApiError
from titan_rl.serving.http.exchange import Answer, Emit, encoded
from titan_rl.serving.http.request import read
from titan_rl.serving.protocols import wire
from titan_rl.serving.protocols.openai.bodies import ChatBody, messages_from, take_prefill, tools_from


def answer_chat(backend: wire.Backend, request: Request) -> Answer:
    """Answer `POST /v1/chat/completions`."""
    turns = backend.require_turns()
    body = read(request, ChatBody)
    policy = backend.policy.named(body.model)
    num_choices = body.n or 1
    backend.check_choices(num_choices, "n")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs require logprobs; set logprobs to true", param="top_logprobs")
    messages, tools = messages_from(body.messages), tools_from(body.tools)
    prefill = take_prefill(messages, body.continue_final_message, body.add_generation_prompt)
    turn_request = TurnRequest(
        caller_of(request),
        policy,
        messages,
        tools,
        body.max_completion_tokens or body.max_tokens,
        body.sampling(backend.stop_token_ids),
        num_choices,
        body.stops,
        one_call=body.parallel_tool_calls is False,
        may_call=body.tool_choice != "none",
        session_id=wire.session_id_of(request),
        constraint=_constraint(body, tools),
        template_kwargs=body.chat_template_kwargs,
        prefill=prefill,
    )
    work = _Work(ServedTurn(turns, turn_request, "chatcmpl-"), body)
    return Answer(backend.exchanges, work, num_completions=num_choices, stream=bool(body.stream))


def _constraint(body: ChatBody, tools: list[dict[str, Any]] | None) -> Constraint | None:
    schema: Any = None
    if (wanted := body.response_format) is not None:
        given = None if wanted.json_schema is None else wanted.json_schema.json_schema
        schema = wire.schema_in(wanted.type, given, "response_format.json_schema.schema")
    return wire.constraint_of(
        tools,
        wire.forced_in(body.tool_choice, ("function", "name")),
        schema,
        one_call=body.parallel_tool_calls is False,
        params=("tool_choice", "response_format"),
    )


class _Work:
    """Answer of one turn, at once or as events."""

    def __init__(self, turn: ServedTurn, body: ChatBody) -> None:
        self._turn = turn
        self._body = body
        self._created = int(time.time())

    async def __call__(self, emit: Emit | None) -> Any:
        return await self._complete_response() if emit is None else await self._stream(emit)

    async def _complete_response(self) -> Any:
        replies = await self._turn.replies()
        choices = [
            {
                "index": index,
                "message": reply.message,
                "logprobs": None,
                **self._tokens(reply.completion),
                **_ending(reply),
            }
            for index, reply in enumerate(replies)
        ]
        envelope = {**self._envelope("chat.completion"), **self._prompt()}
        body = encoded({**envelope, "choices": choices, "usage": self._usage(replies)})
        self._turn.keep(replies)
        return body

    async def _stream(self, emit: Emit) -> None:
        envelope = self._envelope("chat.completion.chunk")
        started: set[int] = set()

        def emit_choice(index: int, delta: dict[str, Any], **more: Any) -> None:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            prompt = {} if started else self._prompt()
            started.add(index)
            emit({**envelope, **prompt, "choices": [choice]})

        def begin(index: int) -> None:
            if index not in started:
                emit_choice(index, {"role": "assistant", "content": ""})

        def on_delta(index: int, delta: Delta) -> None:
            begin(index)
            fields, tokens = _delta_fields(delta), self._tokens(delta) if delta.token_ids else {}
            if fields or tokens:
                emit_choice(index, fields, **tokens)

        replies = await self._turn.replies(on_delta)
        self._turn.keep(replies)
        for index, reply in enumerate(replies):
            begin(index)
            emit_choice(index, {}, **_ending(reply))
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            emit({**envelope, "choices": [], "usage": self._usage(replies)})

    def _usage(self, replies: Sequence[Reply]) -> dict[str, Any]:
        return wire.usage(len(self._turn.prompt_token_ids), [reply.completion for reply in replies])

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._turn.prompt_token_ids)} if self._body.return_token_ids else {}

    def _tokens(self, tokens: wire.Tokens) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._body.logprobs:
            fields["logprobs"] = {"content": wire.token_logprobs(self._turn.text, tokens), "refusal": None}
        if self._body.return_token_ids:
            fields["token_ids"] = list(tokens.token_ids)
        return fields

    def _envelope(self, kind: str) -> dict[str, Any]:
        model = self._turn.request.policy.model
        return {"id": self._turn.id, "object": kind, "created": self._created, "model": model}


def _delta_fields(delta: Delta) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta.tool_calls)]
    return fields


def _ending(reply: Reply) -> dict[str, Any]:
    return {"finish_reason": str(reply.finish_reason), "weight_versions": wire.weight_versions(reply.completion)}
