"""Chats of files in the forms of OpenAI and ShareGPT, converted to messages and tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import DataError
from titan_rl.core.plain_data import safe_repr
from titan_rl.rollout.policy_text import PREFIX, WRITTEN
from titan_rl.rollout.task import Demonstration
from titan_rl.rollout.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    **{role: role for role in ROLES},
}
"""Roles of messages with `from` and `value`. The value of a "function_call" is JSON."""

CHAT_KEYS = ("messages", "conversations", "system", "tools", "functions")

LABELS = (
    *("id", "idx", "uuid", "prompt_id", "conversation_id", "source", "dataset", "category", "language", "model"),
    *("metadata", "parallel_tool_calls"),
)
"""Keys of a chat that say where it comes from. They are ignored."""

MESSAGE_KEYS = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "thinking"),
    *("weight", "train", PREFIX, WRITTEN),
)


def demonstration_of(row: Mapping[str, Any], place: str) -> Demonstration:
    """Conversation of a row, whose messages are all in the form of OpenAI. An assistant's message that must not be
    learned has `"weight": 0`.

    Example: {"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]} gives the messages
    [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}].

    Args:
        row: `messages` (of OpenAI) or `conversations` (of ShareGPT), optionally with `tools` or `functions`, which may
            be JSON text, and a `system` message.
        place: Place of the row, for messages.

    Raises:
        DataError: the row is no chat, has no answer to learn, or has a key without a meaning. Names place and field.
    """
    _require_known(row, (*CHAT_KEYS, *LABELS), CHAT_KEYS, place)
    name = "conversations" if "messages" not in row and "conversations" in row else "messages"
    given = row.get(name)
    if not isinstance(given, list) or not given:
        raise DataError(f"{place}: {name} must be a list of messages, not {_shown(given)}")
    messages = _messages(cast("list[Any]", given), f"{place}: {name}")
    if row.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(row["system"], f"{place}: system")})
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise DataError(f"{place}: {name} has no assistant message, so there is nothing to train on")
    if all(message.get("weight") == 0 for message in answers):
        raise DataError(f"{place}: {name} has no assistant message with a weight, so there is nothing to train on")
    return Demonstration(messages, _tools(row, place))


def openai_messages(prompt: Any) -> Any:
    """Messages of a prompt in the form of OpenAI, if they are in that of ShareGPT; anything else unchanged.

    Raises:
        DataError: a message has an unknown role, or is a call that is not JSON.
    """
    given = cast("list[Any]", prompt if isinstance(prompt, list) else [])
    is_sharegpt = bool(given) and all(isinstance(each, dict) and "from" in each for each in given)
    return _messages(given, "the prompt") if is_sharegpt else cast("Any", prompt)


def require_role(message: Message, place: str) -> None:
    """Check the role of a message.

    Raises:
        DataError: the role is unknown.
    """
    if (role := message.get("role")) not in ROLES:
        meant = SHAREGPT_ROLES.get(str(role))
        hint = f'; write "{meant}"' if meant else ""
        raise DataError(f"{place}.role is {_shown(role)}; it must be one of {', '.join(ROLES)}{hint}")


def _messages(given: Sequence[Any], place: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, each in enumerate(given):
        message = _message(each, f"{place}[{number}]")
        is_call = isinstance(each, Mapping) and cast("Mapping[str, Any]", each).get("from") == "function_call"
        if is_call and messages and messages[-1]["role"] == "assistant":  # an answer is one message, with all its calls
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


def _message(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise DataError(f"{place} must be an object with role and content, not {_shown(given)}")
    fields = {name: value for name, value in cast("Mapping[str, Any]", given).items() if value not in (None, [], {})}
    if "from" in fields:
        fields = _of_sharegpt(fields, place)
    _require_known(fields, MESSAGE_KEYS, MESSAGE_KEYS, place)
    if fields.get("role") == "function":
        fields["role"] = "tool"  # the older form of OpenAI, as is function_call
    require_role(fields, place)
    if "function_call" in fields:
        fields["tool_calls"] = [_call(fields.pop("function_call"), f"{place}.function_call")]
    fields["content"] = _text(fields.get("content", "" if fields.get("tool_calls") else None), f"{place}.content")
    weight, train = fields.pop("weight", 1), fields.pop("train", True)
    if weight not in (0, 1) or train not in (False, True):
        name, value = ("train", train) if weight in (0, 1) else ("weight", weight)
        raise DataError(f"{place}.{name} is {_shown(value)}; it must be 1 to learn the message, or 0")
    return fields if weight and train else {**fields, "weight": 0}


def _of_sharegpt(fields: Mapping[str, Any], place: str) -> dict[str, Any]:
    others = {name: value for name, value in fields.items() if name not in ("from", "value")}
    source, value = fields["from"], fields.get("value")
    role = SHAREGPT_ROLES.get(source) if isinstance(source, str) else None
    if role is None:
        raise DataError(f"{place}.from is {_shown(source)}; it must be one of {', '.join(SHAREGPT_ROLES)}")
    if source != "function_call":
        return {"role": role, "content": value, **others}
    calls = _parsed(value, f"{place}.value")
    calls = cast("list[Any]", calls) if isinstance(calls, list) else [calls]
    return {"role": role, "tool_calls": [_call(call, f"{place}.value") for call in calls], **others}


def _call(call: Any, place: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(cast("Mapping[str, Any]", call).get("name"), str):
        raise DataError(f"{place} must be an object with the name and the arguments of a call, not {_shown(call)}")
    return {"type": "function", "function": dict(cast("Mapping[str, Any]", call))}


def _text(content: Any, place: str) -> str:
    """Text of a message, which may be given in parts of type "text"."""
    if isinstance(content, list):
        texts = [cast("dict[str, Any]", part).get("text") for part in cast("list[Any]", content) if type(part) is dict]
        if len(texts) == len(cast("list[Any]", content)) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    if not isinstance(content, str):
        raise DataError(f"{place} must be a string, not {_shown(content)}")
    return content


def _tools(row: Mapping[str, Any], place: str) -> list[dict[str, Any]] | None:
    name = "functions" if row.get("tools") is None and row.get("functions") is not None else "tools"
    given = row.get(name)
    tools: Any = _parsed(given, f"{place}: {name}") if isinstance(given, str) and given.strip() else given or None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
        raise DataError(f"{place}: {name} must be a list of objects, not {_shown(tools)}")
    found = cast("list[dict[str, Any]]", tools)
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in found] or None


def _parsed(text: Any, place: str) -> Any:
    try:
        return parse_json(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not valid JSON: {error}") from None


def _require_known(fields: Mapping[str, Any], known: Iterable[str], expected: Sequence[str], place: str) -> None:
    unknown = [name for name, value in fields.items() if name not in known and value not in (None, "")]
    if unknown:
        near = [get_close_matches(name, expected, n=1) for name in unknown]
        meant = ", ".join(f"{found[0]} for {name}" for name, found in zip(unknown, near, strict=True) if found)
        hint = f"write {meant}, or remove it" if meant else "remove it, or rename it"
        raise DataError(
            f"{place}: {', '.join(unknown)} has no meaning in a chat here, which has {', '.join(expected)}; {hint}"
        )


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = safe_repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
