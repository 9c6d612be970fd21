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

ONLY_OF = {
    "assistant": ("tool_calls", "function_call", "reasoning_content", "thinking", PREFIX, WRITTEN),
    "tool": ("tool_call_id",),
}
"""Keys of messages that have a meaning for one role alone."""

SHARED_KEYS = ("name", "weight", "train", *(key for keys in ONLY_OF.values() for key in keys))
MESSAGE_KEYS = ("role", "content", *SHARED_KEYS)
SHAREGPT_KEYS = ("from", "value", *SHARED_KEYS)
CALL_KEYS = ("id", "type", "index", "function")
FUNCTION_KEYS = ("name", "arguments")
TOOL_KEYS = ("type", "function", "name", "description", "parameters", "strict")

PAIRS = (("instruction", "output"), ("prompt", "completion"), ("prompt", "chosen"), ("question", "answer"))
"""Columns of data sets with one question and one answer in each row: Alpaca's, TRL's and others."""


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
        DataError: the row is no chat, has no answer, or has a key without a meaning. Names place and field.
    """
    _require_no_pair(row, place)
    _require_known(row, CHAT_KEYS, place, ignored=LABELS)
    _require_one(row, "messages", "conversations", place)
    _require_one(row, "tools", "functions", place)
    name = "conversations" if "messages" not in row and "conversations" in row else "messages"
    given = row.get(name)
    if not isinstance(given, list) or not given:
        raise DataError(f"{place}: {name} must be a list of messages, not {_shown(given)}")
    given = cast("list[Any]", given)
    messages = _messages(given, f"{place}: {name}")
    if messages[-1].get(PREFIX):
        raise _unfinished(f"{place}: {name}[{len(given) - 1}]")
    if row.get("system"):
        system = _text(row["system"], f"{place}: system")
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        elif messages[0]["content"] != system:
            raise DataError(
                f"{place}: system is {_shown(system)}, but {name} begin with another system message; remove one of them"
            )
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(f"{place}: {name} has no assistant message, so there is nothing to train on")
    return Demonstration(messages, _tools(row, place))


def prompt_messages(given: Sequence[Any]) -> list[Message]:
    """Messages of a prompt in the form of OpenAI, also if they are in the form of ShareGPT. The last may be the
    beginning of the answer.

    Raises:
        DataError: a message is wrong; see `demonstration_of`.
    """
    return [*_messages(given, "the prompt")]


def _require_role(message: Message, place: str) -> None:
    if (role := message.get("role")) not in ROLES:
        meant = SHAREGPT_ROLES.get(str(role))
        hint = f'; write "{meant}"' if meant else ""
        raise DataError(f"{place}.role is {_shown(role)}; it must be one of {', '.join(ROLES)}{hint}")
    for only, names in ONLY_OF.items():
        if role != only and (wrong := next((name for name in names if message.get(name)), None)):
            of = "the assistant" if only == "assistant" else f"a {only}"
            raise DataError(
                f"{place}.{wrong} has a meaning only in a message of {of}; remove it, or change the role from "
                f"{_shown(role)}"
            )


def _messages(given: Sequence[Any], place: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, each in enumerate(given):
        before = f"{place}[{number - 1}]"
        message, last = _message(each, f"{place}[{number}]"), messages[-1] if messages else {}
        is_answer, is_begun = last.get("role") == message["role"] == "assistant", bool(last.get(PREFIX))
        if is_begun and not is_answer:
            raise _unfinished(before)
        is_call = cast("Mapping[str, Any]", each).get("from") == "function_call"
        if is_answer and is_call and not is_begun:  # an answer is one message, with all its calls
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if is_answer and not is_begun:
            raise DataError(
                f"{before} and [{number}] are both from the assistant; a message of another role must precede each "
                f'answer. If the second continues the first, mark the first with "{PREFIX}": true'
            )
        messages.append(message)
    return messages


def _unfinished(place: str) -> DataError:
    return DataError(
        f"{place}.{PREFIX} is true, but no message of the assistant follows; remove the mark, or add the rest"
    )


def _message(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise DataError(f"{place} must be an object with role and content, not {_shown(given)}")
    fields = {name: value for name, value in cast("Mapping[str, Any]", given).items() if value not in (None, [], {})}
    if "from" in fields or ("value" in fields and "role" not in fields):
        fields = _of_sharegpt(fields, place)
    _require_known(fields, MESSAGE_KEYS, place)
    if fields.get("role") == "function":
        fields["role"] = "tool"  # the older form of OpenAI, as is function_call
    _require_role(fields, place)
    _require_one(fields, "function_call", "tool_calls", place)
    if "function_call" in fields:
        fields["tool_calls"] = [_call(fields.pop("function_call"), f"{place}.function_call")]
    elif "tool_calls" in fields:
        if not isinstance(calls := fields["tool_calls"], list):
            raise DataError(f"{place}.tool_calls must be a list of calls, not {_shown(calls)}")
        numbered = enumerate(cast("list[Any]", calls))
        fields["tool_calls"] = [_call(call, f"{place}.tool_calls[{at}]") for at, call in numbered]
    fields["content"] = _text(fields.get("content", "" if fields.get("tool_calls") else None), f"{place}.content")
    _read_thought(fields, place)
    weight, train = fields.pop("weight", 1), fields.pop("train", True)
    if weight not in (0, 1) or train not in (False, True):
        name, value = ("train", train) if weight in (0, 1) else ("weight", weight)
        raise DataError(f"{place}.{name} is {_shown(value)}; it must be 1 to learn the message, or 0")
    return fields if weight and train else {**fields, "weight": 0}


def _read_thought(fields: dict[str, Any], place: str) -> None:
    """Read the keys of an answer besides its content, and check that they agree with it."""
    _require_one(fields, "thinking", "reasoning_content", place)
    if "thinking" in fields:
        fields["reasoning_content"] = fields.pop("thinking")
    for name in ("reasoning_content", WRITTEN):
        if name in fields:
            fields[name] = _text(fields[name], f"{place}.{name}")
    for name in ("content", "reasoning_content"):
        part = str(fields.get(name, ""))
        if part.strip() not in fields.get(WRITTEN, part):
            raise DataError(
                f"{place}.{WRITTEN} is {_shown(fields[WRITTEN])}, which does not have the {name}, {_shown(part)}; "
                f"remove {WRITTEN}, or correct it"
            )
    if fields.get(PREFIX, True) not in (False, True):
        raise DataError(f"{place}.{PREFIX} is {_shown(fields[PREFIX])}; it must be true")


def _of_sharegpt(fields: Mapping[str, Any], place: str) -> dict[str, Any]:
    _require_known(fields, SHAREGPT_KEYS, place)
    others = {name: value for name, value in fields.items() if name not in ("from", "value")}
    source, value = fields.get("from"), fields.get("value")
    role = SHAREGPT_ROLES.get(source) if isinstance(source, str) else None
    if role is None:
        raise DataError(f"{place}.from is {_shown(source)}; it must be one of {', '.join(SHAREGPT_ROLES)}")
    if source != "function_call":
        return {"role": role, "content": value, **others}
    _require_one({"value": value, **others}, "value", "tool_calls", place)
    calls = _parsed(value, f"{place}.value")
    calls = cast("list[Any]", calls) if isinstance(calls, list) else [calls]
    return {"role": role, "tool_calls": [_call(call, f"{place}.value") for call in calls], **others}


def _call(given: Any, place: str) -> dict[str, Any]:
    """A call in the form of OpenAI, also if its name and arguments are not in a `function`."""
    if not isinstance(given, Mapping):
        raise DataError(f"{place} must be an object with the name and the arguments of a call, not {_shown(given)}")
    call = {name: value for name, value in cast("Mapping[str, Any]", given).items() if value is not None}
    if "function" in call:
        _require_known(call, CALL_KEYS, place)
        return {"type": "function", **call, "function": _function(call["function"], f"{place}.function")}
    function = {name: call.pop(name) for name in [*call] if name not in CALL_KEYS}
    return {"type": "function", **call, "function": _function(function, place)}


def _function(given: Any, place: str) -> dict[str, Any]:
    function = dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else {}
    _require_known(function, FUNCTION_KEYS, place)
    if not isinstance(function.get("name"), str):
        raise DataError(f"{place} must be an object with the name and the arguments of a call, not {_shown(given)}")
    arguments = _parsed(function.get("arguments") or {}, f"{place}.arguments")
    if not isinstance(arguments, Mapping):
        raise DataError(f"{place}.arguments must be an object, not {_shown(function['arguments'])}")
    return function


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
    return [_tool(tool, f"{place}: {name}[{at}]") for at, tool in enumerate(found)] or None


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """A tool in the form of OpenAI. Templates show all its keys, so only those that seem misspelt are errors."""
    function = tool.get("function", tool)
    for fields in (tool, function):
        if isinstance(fields, Mapping) and (meant := _meant(cast("Mapping[str, Any]", fields), TOOL_KEYS)):
            raise DataError(f"{place}: write {meant}")
    if not isinstance(function, Mapping) or not isinstance(cast("Mapping[str, Any]", function).get("name"), str):
        raise DataError(f"{place} must have a function with a name, not {_shown(function)}")
    return tool if "function" in tool else {"type": "function", "function": tool}


def _parsed(text: Any, place: str) -> Any:
    try:
        return parse_json(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not valid JSON: {error}") from None


def _require_known(fields: Mapping[str, Any], expected: Sequence[str], place: str, ignored: Sequence[str] = ()) -> None:
    known = {*expected, *ignored}
    if unknown := [name for name, value in fields.items() if name not in known and value not in (None, "")]:
        meant = _meant(unknown, expected)
        hint = f"write {meant}, or remove it" if meant else "remove it, or rename it"
        raise DataError(
            f"{place}: {', '.join(unknown)} has no meaning in a chat here, which has {', '.join(expected)}; {hint}"
        )


def _meant(fields: Iterable[str], expected: Sequence[str]) -> str:
    """Advice for misspelt keys, such as "content for contnet"; empty if none is like an expected one."""
    near = {name: get_close_matches(name, expected, n=1, cutoff=0.75) for name in fields if name not in expected}
    return ", ".join(f"{found[0]} for {name}" for name, found in near.items() if found)


def _require_one(fields: Mapping[str, Any], one: str, other: str, place: str) -> None:
    if fields.get(one) and fields.get(other):
        raise DataError(f"{place} has both {one} and {other}; remove one of them")


def _require_no_pair(row: Mapping[str, Any], place: str) -> None:
    """Check that a row is not a question and an answer in columns, which have no roles."""
    pair = next(((asked, said) for asked, said in PAIRS if asked in row and said in row), None)
    if pair is None or row.get("messages") or row.get("conversations"):
        return
    asked, said = pair
    write = f'{{"messages": [{{"role": "user", "content": {asked}}}, {{"role": "assistant", "content": {said}}}]}}'
    if isinstance(row[asked], list):
        write = f'{{"messages": {asked} + {said}}}'
    more = ", with the input, if there is one, after the instruction" if asked == "instruction" else ""
    raise DataError(f"{place}: {asked} and {said} are no chat; write {write}{more}")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = safe_repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
