"""Request bodies of Anthropic's protocol, and conversion between its blocks and OpenAI's chat messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import Field, WithJsonSchema

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.reply import Delta
from titan_rl.serving.http.request import Body, Many
from titan_rl.serving.protocols.wire import (
    STRING,
    Count,
    SamplingBody,
    TemplateKwargs,
    object_schema,
    objects_in,
    string_in,
    text_in,
    union_schema,
    wrong,
)

_TEXT_BLOCK = object_schema(["type", "text"], type={"const": "text"}, text=STRING)
_TEXT_BLOCKS = union_schema(STRING, {"type": "array", "items": _TEXT_BLOCK})
_BLOCK = union_schema(
    _TEXT_BLOCK,
    object_schema(["type", "thinking"], type={"const": "thinking"}, thinking=STRING, signature=STRING),
    object_schema(
        ["type", "id", "name", "input"], type={"const": "tool_use"}, id=STRING, name=STRING, input={"type": "object"}
    ),
    object_schema(["type", "tool_use_id"], type={"const": "tool_result"}, tool_use_id=STRING, content=_TEXT_BLOCKS),
)
_MESSAGE = object_schema(
    ["role", "content"],
    role={"enum": ["user", "assistant", "system"]},
    content=union_schema(STRING, {"type": "array", "items": _BLOCK}),
)
_TOOL = object_schema(["name", "input_schema"], name=STRING, description=STRING, input_schema={"type": "object"})

_THREAD = union_schema(
    object_schema(["type"], type={"const": "create"}),
    object_schema(["type", "previous_message_id"], type={"const": "continue"}, previous_message_id=STRING),
)

AnthropicMessage = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]
TextBlock = Annotated[dict[str, Any], WithJsonSchema(_TEXT_BLOCK)]
Tool = Annotated[dict[str, Any], WithJsonSchema(_TOOL)]
StopSequence = Annotated[str, Field(min_length=1, max_length=1024)]


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


class ConversationBody(SamplingBody):
    """Fields of both `/v1/messages` and `/v1/messages/count_tokens`."""

    messages: Annotated[Many[AnthropicMessage], Field(min_length=1)]
    model: str | None = None
    system: str | Many[TextBlock] | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    # Fields without effect on the completion: the policy itself decides how much it thinks.
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    speed: str | None = None


class MessagesBody(ConversationBody):
    max_tokens: Count
    stop_sequences: Annotated[Many[StopSequence], Field(max_length=16)] | None = None
    stream: bool | None = None
    return_token_ids: bool = False
    thread: Annotated[dict[str, Any], WithJsonSchema(_THREAD)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None


_TEXT = ("text",)
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")

EmitEvent = Callable[[dict[str, Any]], None]


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
            messages.append({"role": "system", "content": text_in(content, f"{where}.content", _TEXT)})
        else:
            raise wrong(f"{where}.role", "must be one of user, assistant, system")
    if messages[-1].get("role") == "assistant":
        where = f"messages[{len(body.messages) - 1}].role"
        raise wrong(where, "is the assistant's; a reply that was begun is not gone on with")
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
            raise wrong(f"{where}.type", "must be 'custom'; this server runs no tools of its own")
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise wrong(f"{where}.input_schema", "must be an object")
        function = {"name": string_in(tool, "name", where), "parameters": dict(cast("Mapping[str, Any]", schema))}
        if description := string_in(tool, "description", where, default=""):
            function = {"name": function["name"], "description": description, "parameters": function["parameters"]}
        tools.append({"type": "function", "function": function})
    return tools or None


class ReplyBlocks:
    """Blocks of one reply, and the events that report them.

    Attributes:
        blocks: Thinking, text and tool uses in this order, as far as the reply has them.
    """

    def __init__(self, emit: EmitEvent) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._emit = emit
        self._is_open = False

    def take(self, delta: Delta) -> None:
        if delta.reasoning:
            if not self._goes_on("thinking"):
                self._begin({"type": "thinking", "thinking": "", "signature": ""})
            self._add("thinking", delta.reasoning, "thinking_delta")
        if delta.content:
            if not self._goes_on("text"):
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

    def _goes_on(self, kind: str) -> bool:
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
        return _BILLING.sub("", text_in(given, "system", _TEXT))
    blocks = objects_in(given, "system")
    return "".join(_BILLING.sub("", text_in([block], f"system[{at}]", _TEXT)) for at, block in enumerate(blocks))


def _of_user(content: Any, where: str) -> list[Message]:
    """Convert a user message. Results of tools become separate messages, and text between them user messages."""
    if not isinstance(content, list):
        return [{"role": "user", "content": text_in(content, where, _TEXT)}]
    messages: list[Message] = []
    for index, block in enumerate(objects_in(content, where)):
        at = f"{where}[{index}]"
        if block.get("type") == "tool_result":
            result = text_in(block.get("content"), f"{at}.content", _TEXT)
            call_id = string_in(block, "tool_use_id", at)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
            continue
        text = text_in([block], where, _TEXT) if block.get("type") == "text" else _unknown(at)
        if messages and messages[-1].get("role") == "user":
            messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}{text}"}
        else:
            messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _of_assistant(content: Any, where: str) -> Message:
    if not isinstance(content, list):
        return {"role": "assistant", "content": text_in(content, where, _TEXT)}
    text = thinking = ""
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(objects_in(content, where)):
        at = f"{where}[{index}]"
        if block.get("type") == "text":
            text += string_in(block, "text", at)
        elif block.get("type") == "thinking":
            thinking += string_in(block, "thinking", at)
        elif block.get("type") == "tool_use":
            given = block.get("input")
            if not isinstance(given, Mapping):
                raise wrong(f"{at}.input", "must be an object")
            function = {"name": string_in(block, "name", at), "arguments": json.dumps(given)}
            calls.append({"id": string_in(block, "id", at), "type": "function", "function": function})
        else:
            _unknown(at)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _unknown(where: str) -> str:
    raise wrong(f"{where}.type", "is not supported; text, thinking, tool_use and tool_result are")
