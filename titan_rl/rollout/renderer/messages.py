"""Messages on their way into a renderer, and out of one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from titan_rl.core.calls.plain import snapshot
from titan_rl.rollout.renderer.types import ParsedResponse
from titan_rl.rollout.types import Message


def renderable(messages: Sequence[Message]) -> list[Any]:
    """Copies, in which a replacement character stands for what tokenizers refuse: half of a surrogate pair."""
    return [_without_surrogates(snapshot(message)) for message in messages]


def message_of(parsed: ParsedResponse) -> Message:
    """The assistant's message that a completion was taken apart into.

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
