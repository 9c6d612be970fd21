"""`POST /v1/responses`: items in, items out, and the server may remember them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import caller_of
from titan_rl.serving.conversations.constraint import Constraint
from titan_rl.serving.conversations.reply import Delta, Reply
from titan_rl.serving.conversations.turn import ServedTurn, TurnAsk, Turns
from titan_rl.serving.http.api_error import ApiError
from titan_rl.serving.http.body import read
from titan_rl.serving.http.dialect import OPENAI, named_event
from titan_rl.serving.http.exchange import Answer, Emit, Exchanges, encoded
from titan_rl.serving.protocols.logprobs import token_logprobs
from titan_rl.serving.protocols.openai.bodies import ResponsesBody
from titan_rl.serving.protocols.openai.response_items import OutputItems, messages_from_input, tools_from_responses
from titan_rl.serving.protocols.openai.stored_responses import StoredResponses
from titan_rl.serving.protocols.wire import (
    constraint_of,
    forced_in,
    schema_in,
    session_id_of,
    turns_of,
    weight_versions,
)
from titan_rl.types import FinishReason


class ResponsesEndpoint:
    def __init__(
        self, turns: Turns | None, exchanges: Exchanges, stored: StoredResponses, stop_token_ids: Sequence[int]
    ) -> None:
        self._turns = turns
        self._exchanges = exchanges
        self._stored = stored
        self._stop_token_ids = stop_token_ids

    def __call__(self, request: Request) -> Answer:
        turns = turns_of(self._turns)
        body = read(request, ResponsesBody)
        turns.policy.check_model(body.model)
        caller = caller_of(request)
        said = [*self._stored.messages(caller, body.previous_response_id), *messages_from_input(body.input)]
        instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        tools = tools_from_responses(body.tools)
        turn = turns.begin(
            TurnAsk(
                caller,
                [*instructions, *said],
                tools,
                body.max_output_tokens,
                body.sampling(self._stop_token_ids),
                one_call=body.parallel_tool_calls is False,
                may_call=body.tool_choice != "none",
                session_id=session_id_of(request),
                param="input",
                constraint=_constraint(body, tools),
                template_kwargs=body.chat_template_kwargs,
            ),
            "resp_",
        )
        keep = None if body.store is False else partial(self._stored.add, caller)
        work = _Work(turns, turn, body, said, keep)
        dialect = replace(OPENAI, event=named_event, stream_error=work.error_event, last=b"")
        return Answer(self._exchanges, work, num_places=1, stream=bool(body.stream), dialect=dialect)


def _constraint(body: ResponsesBody, tools: list[dict[str, Any]] | None) -> Constraint | None:
    wanted = None if body.text is None else body.text.format
    return constraint_of(
        tools,
        forced_in(body.tool_choice, ("name",)),
        None if wanted is None else schema_in(wanted.type, wanted.json_schema, "text.format.schema"),
        one_call=body.parallel_tool_calls is False,
        params=("tool_choice", "text.format"),
    )


class _Work:
    """How one turn is told of."""

    def __init__(
        self,
        turns: Turns,
        turn: ServedTurn,
        body: ResponsesBody,
        said: Sequence[Message],
        keep: Callable[[str, msgspec.Raw, Sequence[Message]], None] | None,
    ) -> None:
        self._turns = turns
        self._turn = turn
        self._body = body
        self._said = said
        self._keep = keep
        self._created = int(time.time())
        self._num_events = 0
        self._emit: Emit | None = None
        self._with_logprobs = body.with_logprobs

    async def __call__(self, emit: Emit | None) -> Any:
        self._emit = emit
        output = OutputItems(self._turn.id, self._tell, with_logprobs=self._with_logprobs)

        def on_delta(_: int, delta: Delta) -> None:
            self._begin()
            output.take(delta, self._logprobs(delta))

        (reply,) = await self._turn.replies(None if emit is None else on_delta)
        self._begin()
        if emit is None:
            kept = reply.completion
            tokens = kept.token_ids, kept.logprobs, kept.top_logprobs
            delta = Delta(reply.reasoning, reply.content, reply.tool_calls, *tokens)
            output.take(delta, self._logprobs(delta))
        status = "incomplete" if reply.finish_reason is FinishReason.LENGTH else "completed"
        output.end(status)
        response = encoded({**self._response(status, output.items), **self._ending(reply)})
        self._turn.keep([reply])
        if self._keep is not None:
            self._keep(self._turn.id, response, [*self._said, reply.message])
        self._tell(f"response.{status}", {"response": response})
        return response

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """The clients of OpenAI raise what is under `error`; the rest is the event as it is documented."""
        told = error.body()["error"]
        code = told["code"] or told["type"]
        event = {"type": "error", "code": code, "message": told["message"], "param": told["param"]}
        return {**event, "sequence_number": self._num_events, "error": told}

    def _begin(self) -> None:
        if not self._num_events:
            for kind in ("created", "in_progress"):
                self._tell(f"response.{kind}", {"response": self._response("in_progress", [])})

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        if self._emit is not None:
            self._emit({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        return [
            {**_with_bytes(each), "top_logprobs": list(map(_with_bytes, each["top_logprobs"]))}
            for each in token_logprobs(self._turns.text, delta)
        ]

    def _ending(self, reply: Reply) -> dict[str, Any]:
        num_prompt, num_completion = len(self._turn.prompt_token_ids), len(reply.completion.token_ids)
        cached = int(reply.completion.metrics.get("cached_prompt_tokens", 0))
        thought = len(self._turns.text.encode(reply.reasoning)) if reply.reasoning else 0
        more: dict[str, Any] = {}
        if self._body.return_token_ids:
            token_ids = list(reply.completion.token_ids)
            more = {"prompt_token_ids": list(self._turn.prompt_token_ids), "token_ids": token_ids}
        return {
            "completed_at": int(time.time()),
            "weight_versions": weight_versions(reply.completion),
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": min(num_prompt, cached), "cache_write_tokens": 0},
                "output_tokens": num_completion,
                "output_tokens_details": {"reasoning_tokens": min(num_completion, thought)},
                "total_tokens": num_prompt + num_completion,
            },
            **more,
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._turn.id,
            "object": "response",
            "created_at": self._created,
            "model": self._turns.policy.model,
            "status": status,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "tools": [{"strict": None, **tool} for tool in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": _format_of(body)},
            "truncation": "disabled",
            "background": False,
            "store": self._keep is not None,
            "metadata": body.metadata or {},
            "usage": None,
        }


def _format_of(body: ResponsesBody) -> dict[str, Any]:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type != "json_schema":
        return {"type": "text" if wanted is None else wanted.type}
    told = {"type": "json_schema", "name": wanted.name or "answer", "schema": wanted.json_schema, "strict": True}
    return told if wanted.description is None else {**told, "description": wanted.description}


def _with_bytes(told: dict[str, Any]) -> dict[str, Any]:
    """The types of this protocol have no null there."""
    return {**told, "bytes": told["bytes"] or []}
