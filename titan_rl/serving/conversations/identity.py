"""Identity of messages: whether a message that a client sends back is one that it was given.

Clients keep the history, not the server, and they seldom send back exactly the same bytes. Differences that do not
count:

    any message     keys whose value is null, "", [] or {}; the order of keys; `cache_control`, which clients move
                    from message to message; the division of a text into parts
    a reply         fields other than its text, its tool calls and its reasoning; white space around the text; `index`
                    and `type` of a tool call
    its tool calls  the form of arguments that are equal as JSON, as text or as an object; numbers are compared as
                    doubles, because JavaScript writes 1.0 as 1
    its reasoning   the absence of reasoning: a reply without any matches every reply with the same text and tool
                    calls, because most clients have no field for sending reasoning back

Any other difference makes another message: a changed word, another id or order of tool calls, other reasoning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from titan_rl.core.plain_data import plain_json
from titan_rl.rollout.renderer.types import Tools
from titan_rl.rollout.types import Message

_EMPTY = (None, "", [], {}, ())
_TEXT_PARTS = ("text", "input_text", "output_text")
_LARGEST_EXACT = 2**53


@dataclass(frozen=True, slots=True)
class Identity:
    """Digests of a message that are equal for equivalent messages.

    Attributes:
        digest: Digest that is equal for messages that differ at most in their reasoning.
        reasoning: Digest of a reply's reasoning; None if it has none.
    """

    digest: bytes
    reasoning: bytes | None = None


def identity_of(message: Message) -> Identity:
    if message.get("role") != "assistant":
        return Identity(_digest(_without_empty({**message, "content": _content(message.get("content"))})))
    content = _content(message.get("content"))
    answer = {
        "content": content.strip() if isinstance(content, str) else content,
        "tool_calls": [_tool_call(call) for call in message.get("tool_calls") or ()],
    }
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    text = reasoning.strip() if isinstance(reasoning, str) else reasoning
    return Identity(_digest({"role": "assistant", **_without_empty(answer)}), _digest(text) if text else None)


def identity_of_tokens(token_ids: Sequence[int]) -> Identity:
    """Identity of input that a client gave as tokens. No message has the same identity."""
    return Identity(_digest({"tokens": list(token_ids)}))


def identity_of_tools(tools: Tools | None) -> bytes:
    """Digest that is equal for the same tools in the same order. An empty list equals no tools."""
    return _digest([_without_empty(tool) for tool in tools or ()])


def identity_of_kwargs(kwargs: Mapping[str, Any]) -> bytes:
    """Digest of the keyword arguments of a chat template."""
    return _digest(dict(kwargs))


def _content(content: Any) -> Any:
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    parts = [_without_empty(part) if isinstance(part, Mapping) else part for part in cast("Sequence[Any]", content)]
    texts = [part.get("text", "") for part in parts if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS]
    return "".join(map(str, texts)) if len(texts) == len(parts) else parts


def _tool_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    call = cast("Mapping[str, Any]", call)
    function = call.get("function")
    if isinstance(function, Mapping):
        function = cast("Mapping[str, Any]", function)
        function = _without_empty({**function, "arguments": _arguments(function.get("arguments"))})
    return _without_empty({"id": call.get("id"), "function": function})


def _arguments(arguments: Any) -> Any:
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return json.loads(text, parse_float=_number, parse_int=_number)
    except (ValueError, TypeError, RecursionError):  # not JSON, because a policy may write anything
        return arguments


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _LARGEST_EXACT else value


def _without_empty(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item not in _EMPTY and key != "cache_control"}


def _digest(value: Any) -> bytes:
    try:
        text = msgspec.json.encode(value, order="sorted")
    except (TypeError, ValueError, OverflowError, RecursionError):  # a lone surrogate, a number with too many digits
        text = _plain_text(value).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def _plain_text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):  # an object of the caller's class, or one that contains itself
        return json.dumps(plain_json(value), sort_keys=True)
