"""The requests of Anthropic's protocol, as far as they are supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from titan_rl.serving.http.body import Body, Many
from titan_rl.serving.protocols.wire import STRING, Count, SamplingBody, TemplateKwargs, object_schema, union_schema

_TEXT = object_schema(["type", "text"], type={"const": "text"}, text=STRING)
_TEXTS = union_schema(STRING, {"type": "array", "items": _TEXT})
_BLOCK = union_schema(
    _TEXT,
    object_schema(["type", "thinking"], type={"const": "thinking"}, thinking=STRING, signature=STRING),
    object_schema(
        ["type", "id", "name", "input"], type={"const": "tool_use"}, id=STRING, name=STRING, input={"type": "object"}
    ),
    object_schema(["type", "tool_use_id"], type={"const": "tool_result"}, tool_use_id=STRING, content=_TEXTS),
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
TextBlock = Annotated[dict[str, Any], WithJsonSchema(_TEXT)]
Tool = Annotated[dict[str, Any], WithJsonSchema(_TOOL)]
StopSequence = Annotated[str, Field(min_length=1, max_length=1024)]


class ToolChoice(Body):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    """Of the tool, where the type is "tool"."""
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
    """What is counted, and what is answered."""

    messages: Annotated[Many[AnthropicMessage], Field(min_length=1)]
    model: str | None = None
    system: str | Many[TextBlock] | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    # These say nothing of the completion: how much it thinks is the policy's own.
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
