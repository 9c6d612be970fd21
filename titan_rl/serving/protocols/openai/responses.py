"""`POST /v1/responses`: items in, items out, and responses stored for later requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import Caller, caller_of
from titan_rl.serving.conversations.constraint import Constraint
from titan_rl.serving.conversations.reply import Delta, Reply
from titan_rl.serving.conversations.turn import ServedTurn, TurnRequest
from titan_rl.serving.http.errors import OPENAI, UNSUPPORTED_VALUE, ApiError, named_event
from titan_rl.serving.http.exchange import Answer, Emit, encoded
from titan_rl.serving.http.request import read
from titan_rl.serving.protocols import wire
from titan_rl.serving.protocols.openai.bodies import TEXT_PARTS, ResponsesBody
from titan_rl.types import FinishReason


class StoredResponses:
    """Stored responses, each as it was sent, and its conversation as JSON."""

    def __init__(self, most_bytes: int) -> None:
        self._stored = wire.CallerCache(most_bytes)

    def add(self, caller: Caller, response_id: str, response: msgspec.Raw, messages: Sequence[Message]) -> None:
        self._stored.add(caller, response_id, bytes(response), msgspec.json.encode(messages))

    def messages(self, caller: Caller, response_id: str | None) -> Sequence[Message]:
        """Return the conversation that a request continues; an empty one if it names no response.

        Raises:
            ApiError: With status 400 if no response of this id is stored any more.
        """
        if response_id is None:
            return ()
        if (found := self._stored.find(caller, response_id)) is None:
            message = "previous_response_id names no stored response; send the whole input"
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        return msgspec.json.decode(found[1])

    def route(self) -> Route:
        """Make the route of `GET` and `DELETE /v1/responses/{id}`."""

        async def one(request: Request) -> Response:
            caller, response_id = caller_of(request), request.path_params["id"]
            for name in request.query_params:
                raise ApiError(400, f"{name} is not supported", param=name, code=UNSUPPORTED_VALUE)
            is_deleted = request.method == "DELETE"
            found = (self._stored.remove if is_deleted else self._stored.find)(caller, response_id)
            if found is None:
                raise ApiError(404, "no response of this id is stored here", param="id", code="response_not_found")
            if is_deleted:
                return JSONResponse({"id": response_id, "object": "response", "deleted": True})
            return Response(found[0], media_type="application/json")

        return Route("/v1/responses/{id}", one, methods=["GET", "DELETE"])


_TOOL_FIELDS = ("name", "description", "parameters", "strict")

EmitEvent = Callable[[str, dict[str, Any]], None]
"""Function that takes the type and the fields of the next event."""


def messages_from_input(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert input items to messages. Consecutive reasoning, text and tool calls of the assistant become one message.

    Raises:
        ApiError: With status 400. The message names the field that is wrong or not supported.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "reasoning":
            reply = _reply(messages, "reasoning_content", "content", "tool_calls")
            reply["reasoning_content"] = _reasoning(item, where)
        elif kind == "function_call":
            reply = _reply(messages)
            reply.setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "function_call_output":
            output = wire.text_in(item.get("output"), f"{where}.output", TEXT_PARTS)
            call_id = wire.string_in(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            raise wire.wrong(f"{where}.type", "is not supported; messages, reasoning and function calls are")
    return messages


def tools_from_responses(given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Convert tools to the form of OpenAI's chat.

    Raises:
        ApiError: With status 400 if a tool is not a function, or has no name.
    """
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(given or ()):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            raise wire.wrong(f"{where}.type", "must be 'function'")
        wire.string_in(tool, "name", where)
        if not isinstance(tool.get("parameters"), Mapping | None):
            raise wire.wrong(f"{where}.parameters", "must be an object")
        function = {name: tool[name] for name in _TOOL_FIELDS if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools or None


class OutputItems:
    """Items of one reply, and the events that report them.

    Attributes:
        items: Reasoning, message and tool calls in this order, as far as the reply has them.
    """

    def __init__(self, response_id: str, emit: EmitEvent, *, with_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._suffix = response_id.partition("_")[2]
        self._emit_event = emit
        self._with_logprobs = with_logprobs
        self._part: dict[str, Any] | None = None  # of the item that is being reported
        self._logprobs: list[dict[str, Any]] = []

    def take(self, delta: Delta, logprobs: Sequence[dict[str, Any]]) -> None:
        """Add a delta of the reply.

        Args:
            logprobs: Logprobs of the tokens of this delta. If the delta is a whole reply, all belong to its text.
        """
        self._logprobs += logprobs
        if delta.reasoning:
            if not self._is_open("reasoning"):
                self._open("rs", {"type": "reasoning", "summary": [], "content": []}, "reasoning_text")
            self._add_text("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            self._open_message()
            self._add_text("response.output_text.delta", delta.content, logprobs=self._logprobs_now())
        for call in delta.tool_calls:
            self._call(call)

    def end(self, status: str) -> None:
        """Complete the last item.

        Args:
            status: Status of the item that is not complete yet: "completed" or "incomplete".
        """
        if not self.items:
            self._open_message()
        self._close(status)

    def _open_message(self) -> None:
        if not self._is_open("message"):
            part = {"annotations": []} | ({"logprobs": []} if self._with_logprobs else {})
            self._open("msg", {"type": "message", "role": "assistant", "content": []}, "output_text", **part)

    def _is_open(self, kind: str) -> bool:
        return self._part is not None and self.items[-1]["type"] == kind

    def _open(self, prefix: str, item: dict[str, Any], part: str, **more: Any) -> None:
        self._begin(prefix, item)
        self._part = {"type": part, "text": "", **more}
        self._emit_of_part("response.content_part.added", part=dict(self._part))

    def _begin(self, prefix: str, item: dict[str, Any]) -> None:
        self._close("completed")
        number = len(self.items)
        self.items.append({"id": f"{prefix}_{self._suffix}{number:02d}", "status": "in_progress", **item})
        self._emit_event("response.output_item.added", {"output_index": number, "item": dict(self.items[-1])})

    def _add_text(self, kind: str, text: str, **more: Any) -> None:
        assert self._part is not None
        self._part["text"] += text
        self._emit_of_part(kind, delta=text, **more)

    def _logprobs_now(self) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        logprobs, self._logprobs = self._logprobs, []
        assert self._part is not None
        self._part["logprobs"] += logprobs
        return logprobs

    def _close(self, status: str) -> None:
        if self._part is None:
            return
        item, part = self.items[-1], self._part
        if item["type"] == "message":
            self._logprobs_now()
            self._emit_of_part("response.output_text.done", text=part["text"], logprobs=part.get("logprobs", []))
        else:
            self._emit_of_part("response.reasoning_text.done", text=part["text"])
        self._emit_of_part("response.content_part.done", part=part)
        self._part = None
        self._complete(content=[part], status=status)

    def _call(self, call: Mapping[str, Any]) -> None:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        self._begin("fc", {"type": "function_call", "call_id": call["id"], "name": name, "arguments": ""})
        self._emit_of_item("response.function_call_arguments.delta", delta=arguments)
        self._emit_of_item("response.function_call_arguments.done", name=name, arguments=arguments)
        self._complete(arguments=arguments, status="completed")

    def _complete(self, **fields: Any) -> None:
        item = self.items[-1]
        item.update(fields)
        self._emit_event("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})

    def _emit_of_item(self, kind: str, **fields: Any) -> None:
        at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        self._emit_event(kind, {**at, **fields})

    def _emit_of_part(self, kind: str, **fields: Any) -> None:
        self._emit_of_item(kind, content_index=0, **fields)


def _add_message(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    content = wire.text_in(item.get("content"), f"{where}.content", TEXT_PARTS)
    if item.get("role") == "assistant":
        _reply(messages, "content", "tool_calls")["content"] = content
        return
    role = wire.string_in(item, "role", where)
    if role not in ("user", "system", "developer"):
        raise wire.wrong(f"{where}.role", "must be one of user, assistant, system, developer")
    messages.append({"role": "system" if role == "developer" else role, "content": content})


def _reply(messages: list[Message], *taken: str) -> dict[str, Any]:
    """Return the assistant's current message, or a new one if that already has one of the fields in `taken`."""
    if not messages or messages[-1].get("role") != "assistant" or any(messages[-1].get(name) for name in taken):
        messages.append({"role": "assistant", "content": ""})
    last = messages[-1]
    assert isinstance(last, dict)
    return last


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary")
    name = "content" if item.get("content") else "summary"
    return wire.text_in(parts, f"{where}.{name}", ("reasoning_text", "summary_text"))


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {"name": wire.string_in(item, "name", where), "arguments": wire.string_in(item, "arguments", where)}
    return {"id": wire.string_in(item, "call_id", where), "type": "function", "function": function}


def answer_responses(backend: wire.Backend, stored: StoredResponses, request: Request) -> Answer:
    """Answer `POST /v1/responses`."""
    turns = backend.require_turns()
    body = read(request, ResponsesBody)
    policy = backend.policy.named(body.model)
    caller = caller_of(request)
    messages = [*stored.messages(caller, body.previous_response_id), *messages_from_input(body.input)]
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    tools = tools_from_responses(body.tools)
    turn_request = TurnRequest(
        caller,
        policy,
        [*instructions, *messages],
        tools,
        body.max_output_tokens,
        body.sampling(backend.stop_token_ids),
        one_call=body.parallel_tool_calls is False,
        may_call=body.tool_choice != "none",
        session_id=wire.session_id_of(request),
        param="input",
        constraint=_constraint(body, tools),
        template_kwargs=body.chat_template_kwargs,
    )
    work = _Work(ServedTurn(turns, turn_request, "resp_"), body, messages, None if body.store is False else stored)
    dialect = replace(OPENAI, event=named_event, stream_error=work.error_event, last=b"")
    return Answer(backend.exchanges, work, stream=bool(body.stream), dialect=dialect)


def _constraint(body: ResponsesBody, tools: list[dict[str, Any]] | None) -> Constraint | None:
    wanted = None if body.text is None else body.text.format
    return wire.constraint_of(
        tools,
        wire.forced_in(body.tool_choice, ("name",)),
        None if wanted is None else wire.schema_in(wanted.type, wanted.json_schema, "text.format.schema"),
        one_call=body.parallel_tool_calls is False,
        params=("tool_choice", "text.format"),
    )


class _Work:
    """Answer of one turn, at once or as events."""

    def __init__(
        self, turn: ServedTurn, body: ResponsesBody, messages: Sequence[Message], stored: StoredResponses | None
    ) -> None:
        self._turn = turn
        self._body = body
        self._messages = messages
        self._stored = stored
        self._created = int(time.time())
        self._num_events = 0
        self._emit: Emit | None = None

    async def __call__(self, emit: Emit | None) -> Any:
        self._emit = emit
        output = OutputItems(self._turn.id, self._emit_event, with_logprobs=self._body.with_logprobs)

        def on_delta(_: int, delta: Delta) -> None:
            self._begin()
            output.take(delta, self._logprobs(delta))

        (reply,) = await self._turn.replies(None if emit is None else on_delta)
        self._begin()
        if emit is None:
            output.take(reply.delta, self._logprobs(reply.delta))
        status = "incomplete" if reply.finish_reason is FinishReason.LENGTH else "completed"
        output.end(status)
        response = encoded({**self._response(status, output.items), **self._ending(reply)})
        self._turn.keep([reply])
        if self._stored is not None:
            caller = self._turn.request.caller
            self._stored.add(caller, self._turn.id, response, [*self._messages, reply.message])
        self._emit_event(f"response.{status}", {"response": response})
        return response

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Make the event of an error. OpenAI's clients raise the content of `error`; the other fields are the
        documented form."""
        fields = error.body()["error"]
        code = fields["code"] or fields["type"]
        event = {"type": "error", "code": code, "message": fields["message"], "param": fields["param"]}
        return {**event, "sequence_number": self._num_events, "error": fields}

    def _begin(self) -> None:
        if not self._num_events:
            for kind in ("created", "in_progress"):
                self._emit_event(f"response.{kind}", {"response": self._response("in_progress", [])})

    def _emit_event(self, kind: str, fields: dict[str, Any]) -> None:
        if self._emit is not None:
            self._emit({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if not self._body.with_logprobs:
            return []
        return [
            {**_with_bytes(each), "top_logprobs": list(map(_with_bytes, each["top_logprobs"]))}
            for each in wire.token_logprobs(self._turn.text, delta)
        ]

    def _ending(self, reply: Reply) -> dict[str, Any]:
        num_prompt, num_completion = len(self._turn.prompt_token_ids), len(reply.completion.token_ids)
        cached = int(reply.completion.metrics.get("cached_prompt_tokens", 0))
        thought = len(self._turn.text.encode(reply.reasoning)) if reply.reasoning else 0
        more: dict[str, Any] = {}
        if self._body.return_token_ids:
            token_ids = list(reply.completion.token_ids)
            more = {"prompt_token_ids": list(self._turn.prompt_token_ids), "token_ids": token_ids}
        return {
            "completed_at": int(time.time()),
            "weight_versions": wire.weight_versions(reply.completion),
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
            "model": self._turn.request.policy.model,
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
            "store": self._stored is not None,
            "metadata": body.metadata or {},
            "usage": None,
        }


def _format_of(body: ResponsesBody) -> dict[str, Any]:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type != "json_schema":
        return {"type": "text" if wanted is None else wanted.type}
    schema_format = {
        "type": "json_schema",
        "name": wanted.name or "answer",
        "schema": wanted.json_schema,
        "strict": True,
    }
    return schema_format if wanted.description is None else {**schema_format, "description": wanted.description}


def _with_bytes(logprob: dict[str, Any]) -> dict[str, Any]:
    """Replace a null in `bytes` by an empty list, because the types of this protocol do not allow null there."""
    return {**logprob, "bytes": logprob["bytes"] or []}
