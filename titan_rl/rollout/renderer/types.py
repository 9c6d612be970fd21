"""Renderer protocol, compatible with the `renderers` package (0.1), and the messages that pass through a renderer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

from titan_rl.core.errors import ModelError
from titan_rl.core.plain_data import snapshot
from titan_rl.rollout.types import Message

Tools = Sequence[Mapping[str, object]]


class RenderedTokens(Protocol):
    """A rendered prompt."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class ParsedToolCall(Protocol):
    """Attempt to call a tool: an object with these attributes, not a dictionary as in OpenAI's clients.

    Attributes:
        name: Name of the tool; None if it cannot be read.
        arguments: Arguments by name, or their text.
        status: "ok", or the kind of error. With an error the policy's answer is an `error_parse`.
        id: ID to which the tool's answer refers; None if the model writes none.

    Example: `SimpleNamespace(name="add", arguments={"a": 1}, status="ok", id=None)`
    """

    name: str | None
    arguments: dict[str, Any] | str | None
    status: Any
    id: str | None


class ParsedResponse(Protocol):
    """Parts of a completion. `reasoning_complete` is False if the completion ended inside its reasoning."""

    @property
    def content(self) -> str: ...

    @property
    def reasoning_content(self) -> str | None: ...

    @property
    def tool_calls(self) -> Sequence[ParsedToolCall]: ...

    @property
    def reasoning_complete(self) -> bool | None: ...


class Renderer(Protocol):
    """Converts between chat messages and tokens, and extends conversations without tokenizing again.

    With an attribute `reads_tool_calls = False`, parsed responses never have `tool_calls`. With an attribute
    `tokenizer`, a Hugging Face tokenizer, rewards get the text exactly as the policy wrote it.
    """

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Tokens of a conversation.  # [num_tokens]"""
        ...

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Message in a completion. Raises an exception of any type if it cannot be parsed."""
        ...

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end a completion, for `SamplingParams.stop_token_ids`."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Next prompt, which begins with exactly the previous prompt and completion; None if that is not possible."""
        ...


def renderable(messages: Sequence[Message]) -> list[Any]:
    """Copies of messages in which replacement characters stand for lone surrogates, which tokenizers refuse."""
    return [_without_surrogates(snapshot(message)) for message in messages]


def message_of(parsed: ParsedResponse) -> Message:
    """Assistant's message made of the parts of a completion.

    Example: `{"role": "assistant", "content": "", "reasoning_content": "It asks for the time.", "tool_calls": [...]}`
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
    return message


def content_of(message: Message) -> str:
    """Text of a message's content, which may have several parts."""
    content: Any = message.get("content") or ""
    if not isinstance(content, list | tuple):
        return str(content)
    given: list[Any] = list(cast("Sequence[Any]", content))
    parts = (cast("Any", part).get("text") if isinstance(part, Mapping) else part for part in given)
    return "".join(part for part in parts if isinstance(part, str))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {_without_surrogates(key): _without_surrogates(item) for key, item in items}
    return [_without_surrogates(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


_SURROGATE = re.compile("[\ud800-\udfff]")


_FIX = (
    'set model.renderer = "auto" or to a renderer of the `renderers` package that is for this model, such as '
    '"renderers:Qwen3Renderer"'
)

_passed: WeakValueDictionary[int, Renderer] = WeakValueDictionary()


def require_tool_support(renderer: Renderer, messages: Sequence[Message], tools: Tools) -> None:
    """Check that a renderer shows tools to the model and parses their calls. Each renderer is checked once.

    Args:
        renderer: The renderer.
        messages: Opening messages of a conversation with the tools.
        tools: The tools.

    Raises:
        ModelError: the prompt is the same with and without the tools, or the renderer does not parse a call that it has
            rendered itself.
    """
    if id(renderer) in _passed:
        return
    name = type(renderer).__name__
    shown = renderable(messages)
    offered: list[Any] = list(tools)
    prompt = list(renderer.render_ids(shown, tools=offered, add_generation_prompt=True))
    if prompt == list(renderer.render_ids(shown, tools=None, add_generation_prompt=True)):
        raise ModelError(f"{name} does not show the model the environment's {len(offered)} tools; {_FIX}")
    if not getattr(renderer, "reads_tool_calls", True) or not _reads_calls(renderer, shown, offered, prompt):
        problem: str | None = getattr(renderer, "call_problem", None)
        why = "" if problem is None else f" ({problem})"
        raise ModelError(f"{name} does not parse tool calls{why}, but the environment has {len(offered)} tools; {_FIX}")
    _passed[id(renderer)] = renderer


def _reads_calls(renderer: Renderer, messages: list[Any], tools: list[Any], prompt: list[int]) -> bool:
    """Check whether a rendered call is parsed as a call; True if that cannot be determined."""
    tool: Any = tools[0]
    function: Any = {"name": tool.get("function", tool).get("name"), "arguments": {}}
    call: Any = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "0", "function": function}],
    }
    try:
        token_ids = list(renderer.render_ids([*messages, call], tools=tools))
        if token_ids[: len(prompt)] != prompt:
            return True  # the renderer begins a given answer differently from how it ends a prompt
        parsed = renderer.parse_response(token_ids[len(prompt) :], tools=tools, prompt_ids=prompt)
    except Exception:  # a renderer may refuse this call for other reasons
        return True
    return bool(parsed.tool_calls)
