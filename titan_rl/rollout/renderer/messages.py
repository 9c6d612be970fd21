"""Messages on their way into and out of a renderer, and the check that a renderer supports tools."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

from titan_rl.core.calls.plain import snapshot
from titan_rl.core.errors import ModelError
from titan_rl.rollout.renderer.types import ParsedResponse, Renderer, Tools
from titan_rl.rollout.types import Message


def renderable(messages: Sequence[Message]) -> list[Any]:
    """Copies in which a replacement character stands for half surrogate pairs, which tokenizers refuse."""
    return [_without_surrogates(snapshot(message)) for message in messages]


def message_of(parsed: ParsedResponse) -> Message:
    """Assistant's message from the parts of a completion.

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
    """Check that a renderer shows tools to the model and parses their calls. A renderer is checked once.

    Args:
        messages: opening messages of a conversation with the tools.

    Raises:
        ModelError: the prompt is the same with and without the tools, or a call that the renderer itself renders is no
            call when it is read back.
    """
    if id(renderer) in _passed:
        return
    name = type(renderer).__name__
    shown = renderable(messages)
    offered: list[Any] = list(tools)
    prompt = list(renderer.render_ids(shown, tools=offered, add_generation_prompt=True))
    if prompt == list(renderer.render_ids(shown, tools=None, add_generation_prompt=True)):
        raise ModelError(f"{name} shows the model none of the {len(offered)} tools that the environment gives; {_FIX}")
    if not getattr(renderer, "reads_tool_calls", True) or not _reads_calls(renderer, shown, offered, prompt):
        raise ModelError(f"{name} reads no calls of tools, and the environment gives {len(offered)}; {_FIX}")
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
        whole = list(renderer.render_ids([*messages, call], tools=tools))
        if whole[: len(prompt)] != prompt:
            return True  # it puts something else before an answer that it knows
        parsed = renderer.parse_response(whole[len(prompt) :], tools=tools, prompt_ids=prompt)
    except Exception:  # it may refuse this call for a reason of its own
        return True
    return bool(parsed.tool_calls)
