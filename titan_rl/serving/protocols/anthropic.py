"""Anthropic's protocol: `POST /v1/messages` with message threads, token counting, and its form of errors.

Its blocks are converted to and from OpenAI's chat messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import Field
from starlette.requests import Request

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import Caller, caller_of
from titan_rl.serving.conversations.reply import Delta, Reply
from titan_rl.serving.conversations.turn import ServedTurn, TurnRequest
from titan_rl.serving.http.errors import ApiError, Dialect, named_event
from titan_rl.serving.http.exchange import Answer, Emit, encoded
from titan_rl.serving.http.request import Body, Many, read
from titan_rl.serving.protocols import wire
from titan_rl.types import FinishReason

AnthropicMessage = Annotated[dict[str, Any], wire.described("AnthropicMessage")]
TextBlock = Annotated[dict[str, Any], wire.described("AnthropicTextBlock")]
Tool = Annotated[dict[str, Any], wire.described("AnthropicTool")]


class ToolChoice(Body):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    """Name of the tool, with type "tool"."""
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class NothingCleared(Body):
    type: Annotated[str, Field(pattern="^clear_thinking_")]
    keep: Literal["all"]


class ContextManagement(Body):
    edits: list[NothingCleared] | None = None


class ConversationBody(wire.SamplingBody):
    """Fields of both `/v1/messages` and `/v1/messages/count_tokens`."""

    messages: Annotated[Many[AnthropicMessage], Field(min_length=1)]
    model: str | None = None
    system: str | Many[TextBlock] | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: wire.TemplateKwargs | None = None
    # Fields without effect on the completion: the policy itself decides how much it thinks.
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    speed: str | None = None


class MessagesBody(ConversationBody):
    max_tokens: wire.Count
    stop_sequences: Annotated[Many[wire.StopString], Field(max_length=16)] | None = None
    stream: bool | None = None
    return_token_ids: bool = False
    thread: Annotated[dict[str, Any], wire.described("AnthropicThread")] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None


_TEXT = ("text",)
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def messages_from_blocks(body: ConversationBody) -> list[Message]:
    """Convert a request's blocks to messages in the form of OpenAI's chat.

    Raises:
        ApiError: With status 400. The message names the field that is wrong or not supported.
    """
    messages: list[Message] = []
    if system := system_of(body.system):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role == "user":
            messages += _of_user(content, f"{where}.content")
        elif role == "assistant":
            messages.append(_of_assistant(content, f"{where}.content"))
        elif role == "system":
            messages.append({"role": "system", "content": wire.text_in(content, f"{where}.content", _TEXT)})
        else:
            raise wire.wrong(f"{where}.role", "must be one of user, assistant, system")
    if messages[-1].get("role") == "assistant":
        where = f"messages[{len(body.messages) - 1}].role"
        raise wire.wrong(where, "is the assistant's; prefilled replies are not supported")
    return messages


def tools_from_anthropic(given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Convert tools to the form of OpenAI's chat.

    Raises:
        ApiError: With status 400 if a tool would have to be run by the server, or has no name.
    """
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(given or ()):
        where = f"tools[{index}]"
        if tool.get("type") not in (None, "custom"):
            raise wire.wrong(f"{where}.type", "must be 'custom'; this server runs no tools of its own")
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise wire.wrong(f"{where}.input_schema", "must be an object")
        function: dict[str, Any] = {"name": wire.string_in(tool, "name", where)}
        if description := wire.string_in(tool, "description", where, default=""):
            function["description"] = description
        function["parameters"] = dict(cast("Mapping[str, Any]", schema))
        tools.append({"type": "function", "function": function})
    return tools or None


class ReplyBlocks:
    """Blocks of one reply, and the events that report them.

    Attributes:
        blocks: Thinking, text and tool uses in this order, as far as the reply has them.
    """

    def __init__(self, emit: Emit) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._emit = emit
        self._is_open = False

    def take(self, delta: Delta) -> None:
        if delta.reasoning:
            if not self._has_open("thinking"):
                self._begin({"type": "thinking", "thinking": "", "signature": ""})
            self._add("thinking", delta.reasoning, "thinking_delta")
        if delta.content:
            if not self._has_open("text"):
                self._begin({"type": "text", "text": "", "citations": None})
            self._add("text", delta.content, "text_delta")
        for call in delta.tool_calls:
            function = call["function"]
            self._begin({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
            self.blocks[-1]["input"] = msgspec.Raw(function["arguments"].encode())

    def end(self) -> None:
        if self._is_open:
            self._emit({"type": "content_block_stop", "index": len(self.blocks) - 1})
            self._is_open = False

    def _has_open(self, kind: str) -> bool:
        return self._is_open and self.blocks[-1]["type"] == kind

    def _begin(self, block: dict[str, Any]) -> None:
        self.end()
        self.blocks.append(block)
        self._is_open = True
        self._emit({"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)})

    def _add(self, name: str, text: str, kind: str) -> None:
        self.blocks[-1][name] += text
        self._delta({"type": kind, name: text})

    def _delta(self, delta: dict[str, Any]) -> None:
        self._emit({"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta})


def system_of(given: Any) -> str:
    """Return the text of `system` without the billing header of Claude Code. That line differs in each request, so with
    it every turn would begin a new conversation."""
    if not isinstance(given, list):
        return _BILLING.sub("", wire.text_in(given, "system", _TEXT))
    blocks = wire.objects_in(given, "system")
    return "".join(_BILLING.sub("", wire.part_text(block, f"system[{at}]", _TEXT)) for at, block in enumerate(blocks))


def _of_user(content: Any, where: str) -> list[Message]:
    """Convert a user message. Results of tools become separate messages, and text between them user messages."""
    if not isinstance(content, list):
        return [{"role": "user", "content": wire.text_in(content, where, _TEXT)}]
    messages: list[Message] = []
    for index, block in enumerate(wire.objects_in(content, where)):
        at = f"{where}[{index}]"
        if block.get("type") == "tool_result":
            result = wire.text_in(block.get("content"), f"{at}.content", _TEXT)
            call_id = wire.string_in(block, "tool_use_id", at)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        elif block.get("type") != "text":
            raise _unknown(at)
        elif messages and messages[-1].get("role") == "user":
            text = f"{messages[-1]['content']}{wire.string_in(block, 'text', at)}"
            messages[-1] = {"role": "user", "content": text}
        else:
            messages.append({"role": "user", "content": wire.string_in(block, "text", at)})
    return messages or [{"role": "user", "content": ""}]


def _of_assistant(content: Any, where: str) -> Message:
    if not isinstance(content, list):
        return {"role": "assistant", "content": wire.text_in(content, where, _TEXT)}
    text = thinking = ""
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(wire.objects_in(content, where)):
        at = f"{where}[{index}]"
        if block.get("type") == "text":
            text += wire.string_in(block, "text", at)
        elif block.get("type") == "thinking":
            thinking += wire.string_in(block, "thinking", at)
        elif block.get("type") == "tool_use":
            given = block.get("input")
            if not isinstance(given, Mapping):
                raise wire.wrong(f"{at}.input", "must be an object")
            function = {"name": wire.string_in(block, "name", at), "arguments": json.dumps(given)}
            calls.append({"id": wire.string_in(block, "id", at), "type": "function", "function": function})
        else:
            raise _unknown(at)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _unknown(where: str) -> ApiError:
    return wire.wrong(f"{where}.type", "is not supported; text, thinking, tool_use and tool_result are")


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error(error: ApiError) -> dict[str, Any]:
    """Make the body of an error. It has no field for the parameter that is wrong, so the message names it. Clients act
    on the code in `details`, for example by leaving out an unsupported feature."""
    message, param = error.message, error.param
    if param is not None and param not in message:
        message = f"{param}: {message}"
    fields: dict[str, Any] = {
        "type": _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error"),
        "message": message,
    }
    if error.code is not None:
        fields["details"] = {"error_code": error.code}
    return {"type": "error", "error": fields}


ANTHROPIC = Dialect(_error, named_event, _error, request_id_headers=(b"request-id", b"x-request-id"))


class Threads:
    """Conversations by the id of their last reply, as JSON.

    A reply that is held may be continued any number of times, for retries and branches. These error codes tell
    Anthropic's clients how to proceed:

        thread_not_found             the reply is not held (any more): send the whole history under a new thread
        thread_unsupported_request   another kind of thread: send the whole history without a thread
        thread_fingerprint_mismatch  `system` or `tools` of a request that continues a thread differ from the thread's
    """

    def __init__(self, most_bytes: int) -> None:
        self._held = wire.CallerCache(most_bytes)

    def conversation(self, caller: Caller, body: MessagesBody) -> tuple[Sequence[Message], list[dict[str, Any]] | None]:
        """Return the whole conversation of a request, including the part that its thread holds: its messages and its
        tools, in the form of OpenAI's chat.

        Raises:
            ApiError: With status 404 if the thread is not held, 400 if it cannot be continued like this or a message is
                wrong.
        """
        thread, messages = body.thread, messages_from_blocks(body)
        tools = tools_from_anthropic(body.tools)
        kind = None if thread is None else thread.get("type")
        if thread is None or kind == "create":
            return messages, tools
        if kind != "continue":
            message = "thread.type must be 'create' or 'continue'; send the whole conversation without a thread"
            raise ApiError(400, message, param="thread.type", code="thread_unsupported_request")
        held_messages, held_tools = self._find(caller, thread.get("previous_message_id"))
        if body.tools is not None and tools != held_tools:
            raise _differs("tools")
        has_system = bool(system_of(body.system))
        if has_system and messages[0] != held_messages[0]:
            raise _differs("system")
        return [*held_messages, *messages[has_system:]], held_tools

    def hold(self, turn: ServedTurn, reply: Message) -> None:
        """Hold the conversation of a turn with its reply, so that it can be continued."""
        request = turn.request
        self._held.add(request.caller, turn.id, msgspec.json.encode(([*request.messages, reply], request.tools)))

    def _find(self, caller: Caller, message_id: Any) -> tuple[list[Message], list[dict[str, Any]] | None]:
        if not isinstance(message_id, str):
            raise ApiError(400, "thread.previous_message_id must be a string", param="thread.previous_message_id")
        if (held := self._held.find(caller, message_id)) is None:
            message = "thread.previous_message_id names no message that is stored here; send the whole conversation"
            raise ApiError(404, message, param="thread.previous_message_id", code="thread_not_found")
        return msgspec.json.decode(held[0])


def _differs(field: str) -> ApiError:
    message = f"{field} differs from that of the thread; leave it out, or create a new thread"
    return ApiError(400, message, param=field, code="thread_fingerprint_mismatch")


_STOP_REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use"}


def answer_messages(backend: wire.Backend, threads: Threads, request: Request) -> Answer:
    """Answer `POST /v1/messages`."""
    turns = backend.require_turns()
    body = read(request, MessagesBody)
    messages, tools = threads.conversation(caller_of(request), body)
    turn_request = replace(
        _turn_request(backend, body, request, messages, tools),
        max_tokens=body.max_tokens,
        sampling=body.sampling(backend.stop_token_ids),
        stops=tuple(body.stop_sequences or ()),
    )
    work = _Work(ServedTurn(turns, turn_request, "msg_"), body, threads)
    return Answer(backend.exchanges, work, stream=bool(body.stream), dialect=ANTHROPIC)


def answer_count_tokens(backend: wire.Backend, request: Request) -> Answer:
    """Answer `POST /v1/messages/count_tokens`."""
    turns = backend.require_turns()
    body = read(request, ConversationBody)
    messages, tools = messages_from_blocks(body), tools_from_anthropic(body.tools)
    turn_request = _turn_request(backend, body, request, messages, tools)

    async def work(_: Emit | None) -> dict[str, int]:
        return {"input_tokens": len((await turns.prompt(turn_request)).prompt_token_ids)}

    return Answer(backend.exchanges, work, dialect=ANTHROPIC)


def _turn_request(
    backend: wire.Backend,
    body: ConversationBody,
    request: Request,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
) -> TurnRequest:
    policy = backend.policy.named(body.model)
    choice, output = body.tool_choice, body.output_config
    one_call = choice is not None and bool(choice.disable_parallel_tool_use)
    forced: wire.Forced = None
    if choice is not None and choice.type in ("any", "tool"):
        forced = wire.string_in({"name": choice.name}, "name", "tool_choice") if choice.type == "tool" else True
    schema = None if output is None or output.format is None else output.format.json_schema
    params = "tool_choice", "output_config.format"
    return TurnRequest(
        caller_of(request),
        policy,
        messages,
        tools,
        one_call=one_call,
        may_call=choice is None or choice.type != "none",
        session_id=wire.session_id_of(request),
        constraint=wire.constraint_of(tools, forced, schema, one_call=one_call, params=params),
        template_kwargs=body.chat_template_kwargs,
    )


class _Work:
    """Answer of one turn, at once or as events."""

    def __init__(self, turn: ServedTurn, body: MessagesBody, threads: Threads) -> None:
        self._turn = turn
        self._body = body
        self._threads = threads
        self._emit: Emit | None = None
        self._is_started = False

    async def __call__(self, emit: Emit | None) -> Any:
        self._emit = emit
        blocks = ReplyBlocks(self._emit_event)

        def on_delta(_: int, delta: Delta) -> None:
            self._start()
            blocks.take(delta)

        (reply,) = await self._turn.replies(None if emit is None else on_delta)
        self._start()
        more: dict[str, Any] = {"usage": self._usage(len(reply.completion.token_ids))}
        more["weight_versions"] = wire.weight_versions(reply.completion)
        if self._body.return_token_ids:
            more["prompt_token_ids"] = list(self._turn.prompt_token_ids)
            more["token_ids"] = list(reply.completion.token_ids)
        if emit is None:
            blocks.take(reply.delta)
            body = encoded({**self._message(blocks.blocks), **_ending(reply), **more})
            self._keep(reply)
            return body
        self._keep(reply)
        blocks.end()
        emit({"type": "message_delta", "delta": _ending(reply), **more})
        emit({"type": "message_stop"})
        return None

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._emit_event({"type": "message_start", "message": self._message([])})

    def _emit_event(self, event: dict[str, Any]) -> None:
        if self._emit is not None:
            self._emit(event)

    def _keep(self, reply: Reply) -> None:
        self._turn.keep([reply])
        if self._body.thread is not None:
            self._threads.hold(self._turn, reply.message)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._turn.id,
            "type": "message",
            "role": "assistant",
            "model": self._turn.request.policy.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0),
        }

    def _usage(self, num_completion_tokens: int) -> dict[str, Any]:
        """Report usage. Cached and other prompt tokens are one number, because the cached part is unknown when a stream
        begins, and the end of the stream must report the same as its beginning."""
        return {
            "input_tokens": len(self._turn.prompt_token_ids),
            "cache_read_input_tokens": None,
            "cache_creation_input_tokens": None,
            "output_tokens": num_completion_tokens,
        }


def _ending(reply: Reply) -> dict[str, Any]:
    reason = _STOP_REASONS.get(reply.finish_reason, "end_turn" if reply.stop is None else "stop_sequence")
    return {"stop_reason": reason, "stop_sequence": reply.stop}
