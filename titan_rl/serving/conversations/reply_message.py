"""The message of a completion, and which calls of tools in it are whole."""

from __future__ import annotations

import json
import uuid
from typing import Any

from titan_rl.rollout.renderer.types import ParsedResponse, ParsedToolCall


def has_call(parsed: ParsedResponse) -> bool:
    return any(_function_of(call) is not None for call in parsed.tool_calls)


def _function_of(call: ParsedToolCall) -> dict[str, str] | None:
    """What a call calls, in the form of OpenAI's chat. None where the call is malformed: where the renderer says so, or
    it has no name, or its arguments are no object that every client can read as JSON."""
    if str(call.status) != "ok" or not isinstance(call.name, str) or not call.name:
        return None
    arguments: Any = {} if call.arguments is None else call.arguments
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        shown = json.dumps([call.name, arguments], ensure_ascii=False, allow_nan=False)
        shown.encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    return {"name": call.name, "arguments": json.dumps(arguments)}


def reply_from(parsed: ParsedResponse, *, end: int | None = None) -> dict[str, Any]:
    """The message a client is given. A call of a tool that is malformed is part of its text, as it was written.

    Args:
        end: where the content ends in a stop string.
    """
    message: dict[str, Any] = {"refusal": None, "role": "assistant"}
    if reasoning := (parsed.reasoning_content or "").strip():
        message["reasoning_content"] = reasoning
    content = parsed.content if end is None else parsed.content[:end]
    calls: list[dict[str, Any]] = []
    for call in parsed.tool_calls:
        if (function := _function_of(call)) is None:
            content += str(getattr(call, "raw", ""))
            continue
        calls.append({"id": call.id or f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    message["content"] = content if content or not calls else None
    return message
