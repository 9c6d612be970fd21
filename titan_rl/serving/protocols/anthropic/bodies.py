"""The requests of Anthropic's protocol, as far as they are supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from titan_rl.serving.http.body import Body
from titan_rl.serving.protocols.wire import Count, SamplingBody

StopSequence = Annotated[str, Field(min_length=1, max_length=1024)]


class ToolChoice(Body):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    effort: str | None = None


class ConversationBody(SamplingBody):
    """What is counted, and what is answered."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    # These say nothing of the completion: how much it thinks is the policy's own.
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    speed: str | None = None


class MessagesBody(ConversationBody):
    max_tokens: Count
    stop_sequences: Annotated[list[StopSequence], Field(max_length=16)] | None = None
    stream: bool | None = None
    return_token_ids: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
