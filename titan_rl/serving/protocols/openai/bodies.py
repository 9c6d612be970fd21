"""Supported part of the request bodies of OpenAI's protocol, and the messages and tools in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Field

from titan_rl.serving.http.request import Body, Many
from titan_rl.serving.protocols import wire

Chat = Annotated[dict[str, Any], wire.described("Chat")]
Tool = Annotated[dict[str, Any], wire.described("Tool")]
Item = Annotated[dict[str, Any], wire.described("Item")]
ResponsesTool = Annotated[dict[str, Any], wire.described("ResponsesTool")]
ToolChoice = Annotated[str | dict[str, Any], wire.described("ToolChoice")]
ResponsesToolChoice = Annotated[str | dict[str, Any], wire.described("ResponsesToolChoice")]
T = TypeVar("T")
Prompts = Annotated[Many[T], Field(max_length=4096)]


class OpenAIBody(wire.SamplingBody):
    """Fields of all three endpoints."""

    model: str | None = None
    stream: bool | None = None
    stream_options: wire.StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool = False


class TurnBody(OpenAIBody):
    """Fields of both chat completions and responses."""

    top_logprobs: wire.TopCount | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: wire.TemplateKwargs | None = None
    # Fields without effect on the completion.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None


class TextBody(OpenAIBody):
    """Fields of both chat and text completions."""

    n: wire.Count | None = None
    max_tokens: wire.Count | None = None
    stop: wire.StopString | Annotated[Many[wire.StopString], Field(max_length=16)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(TextBody):
    prompt: str | Prompts[str] | Many[wire.TokenId] | Prompts[Many[wire.TokenId]]
    logprobs: wire.TopCount | None = None
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs or 0


class ChatBody(TextBody, TurnBody):
    messages: Annotated[Many[Chat], Field(min_length=1)]
    max_completion_tokens: wire.Count | None = None
    logprobs: bool | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    modalities: Annotated[Many[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    store: Literal[False] | None = None
    # Fields without effect on the completion: the policy itself decides how much it thinks.
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @property
    def num_top_logprobs(self) -> int:
        return self.top_logprobs or 0


class JsonSchema(Body):
    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None  # always enforced


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ResponsesFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class ResponsesText(Body):
    format: ResponsesFormat | None = None
    verbosity: str | None = None


class ResponsesBody(TurnBody):
    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    max_output_tokens: wire.Count | None = None
    tools: Many[ResponsesTool] | None = None
    tool_choice: ResponsesToolChoice | None = None
    store: bool | None = None
    include: Many[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: ResponsesText | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    # Fields without effect on the completion: the policy itself decides how much it thinks.
    reasoning: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def num_top_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.with_logprobs else 0


_ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")


def messages_from(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages to the form that a renderer takes: content is text, and the developer role becomes system.

    Raises:
        ApiError: With status 400. The message names the field that is wrong or not supported.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def tools_from(given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Check the tools of a request.

    Raises:
        ApiError: With status 400 if a tool is not a function, or has no name.
    """
    for index, tool in enumerate(given or ()):
        if tool.get("type") != "function":
            raise wire.wrong(f"tools[{index}].type", "must be 'function'")
        if not isinstance(_function_in(tool, f"tools[{index}]").get("parameters", {}), Mapping):
            raise wire.wrong(f"tools[{index}].function.parameters", "must be an object")
    return [dict(tool) for tool in given] if given else None


def take_prefill(
    messages: list[dict[str, Any]], continue_final: bool, add_generation_prompt: bool | None
) -> str | None:
    """Remove the last message if a reply continues it, and return its text. Returns None if no message is continued.

    Raises:
        ApiError: With status 400 if the last message is not a text of the assistant, or the two fields contradict each
            other.
    """
    if not continue_final:
        if add_generation_prompt is False:
            raise wire.wrong("add_generation_prompt", "is false; only continue_final_message works without it")
        return None
    if add_generation_prompt:
        raise wire.wrong(
            "add_generation_prompt", "is true together with continue_final_message, which begins no new message"
        )
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or len(messages) < 2:
        where = f"messages[{len(messages) - 1}]"
        raise wire.wrong(where, "must be the beginning of an assistant's text, after another message, to be continued")
    return messages.pop()["content"]


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = given.get("role")
    if role not in _ROLES:
        raise wire.wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    message = {name: value for name, value in given.items() if value is not None and name != "content"}
    message["role"] = "system" if role == "developer" else role
    message["content"] = wire.text_in(given.get("content"), f"{where}.content", TEXT_PARTS)
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise wire.wrong(f"{where}.tool_calls", "must be a list")
        for index, call in enumerate(cast("list[Any]", calls)):
            at = f"{where}.tool_calls[{index}]"
            if not isinstance(_function_in(call, at).get("arguments", ""), str | Mapping):
                raise wire.wrong(f"{at}.function.arguments", "must be a string")
    for name in ("reasoning_content", "reasoning", "name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str):
            raise wire.wrong(f"{where}.{name}", "must be a string")
    return message


def _function_in(given: Any, where: str) -> Mapping[str, Any]:
    """Return the function of a tool or of a call."""
    function: Any = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(cast("Any", function).get("name"), str):
        raise wire.wrong(f"{where}.function", "must be an object with a name")
    return cast("Mapping[str, Any]", function)
