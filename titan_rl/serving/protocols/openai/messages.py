"""The messages and tools that a client sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from titan_rl.serving.protocols.wire import text_in, wrong

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text")


def messages_from(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a renderer takes: content is text, and a developer is the system.

    Raises:
        ApiError: 400, names the field that is wrong or not supported.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def tools_from(given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """
    Raises:
        ApiError: 400, one is no function, or has no name.
    """
    for index, tool in enumerate(given or ()):
        if tool.get("type") != "function":
            raise wrong(f"tools[{index}].type", "must be 'function'")
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(cast("Any", function).get("name"), str):
            raise wrong(f"tools[{index}].function", "must be an object with a name")
        if not isinstance(cast("Any", function).get("parameters", {}), Mapping):
            raise wrong(f"tools[{index}].function.parameters", "must be an object")
    return [dict(tool) for tool in given] if given else None


def begun_in(messages: list[dict[str, Any]], continue_final: bool, add_generation_prompt: bool | None) -> str | None:
    """The text of the reply that the last message has begun, which is taken off; None where none is gone on with.

    Raises:
        ApiError: 400, the last message is no text of the assistant's, or the two fields do not go together.
    """
    if not continue_final:
        if add_generation_prompt is False:
            raise wrong("add_generation_prompt", "is false; a prompt without it is gone on with by no reply")
        return None
    if add_generation_prompt:
        raise wrong("add_generation_prompt", "is true beside continue_final_message, which begins no new message")
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or len(messages) < 2:
        where = f"messages[{len(messages) - 1}]"
        raise wrong(where, "must be a text that the assistant has begun, behind another message, to be continued")
    return messages.pop()["content"]


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    message = {name: value for name, value in given.items() if value is not None and name != "content"}
    message["role"] = _ROLES[role]
    message["content"] = text_in(given.get("content"), f"{where}.content", TEXT_PARTS)
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise wrong(f"{where}.tool_calls", "must be a list")
        for index, call in enumerate(cast("list[Any]", calls)):
            _check_call(call, f"{where}.tool_calls[{index}]")
    for name in ("reasoning_content", "reasoning", "name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str):
            raise wrong(f"{where}.{name}", "must be a string")
    return message


def _check_call(call: Any, where: str) -> None:
    function: Any = cast("Mapping[str, Any]", call).get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(cast("Any", function).get("name"), str):
        raise wrong(f"{where}.function", "must be an object with a name")
    if not isinstance(cast("Any", function).get("arguments", ""), str | Mapping):
        raise wrong(f"{where}.function.arguments", "must be a string")
