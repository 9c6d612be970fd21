"""Items of `/v1/responses` as messages, and a reply as items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.reply import Delta
from titan_rl.serving.protocols.openai.messages import TEXT_PARTS, messages_from, tools_from
from titan_rl.serving.protocols.wire import string_in, text_in, wrong

_TOOL_FIELDS = ("name", "description", "parameters", "strict")

Tell = Callable[[str, dict[str, Any]], None]
"""Takes the type and the fields of the next event."""


def messages_from_input(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """What is said in a row by the assistant is one message: its reasoning, its text and its calls of tools.

    Raises:
        ApiError: 400, names the field that is wrong or not supported.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "reasoning":
            reply = _reply(messages, "reasoning_content", "content", "tool_calls")
            reply["reasoning_content"] = _reasoning(item, where)
        elif kind == "function_call":
            reply = _reply(messages)
            reply.setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "function_call_output":
            output = text_in(item.get("output"), f"{where}.output", TEXT_PARTS)
            call_id = string_in(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            raise wrong(f"{where}.type", "is not supported; messages, reasoning and function calls are")
    return messages


def tools_from_responses(given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools in the form of OpenAI's chat.

    Raises:
        ApiError: 400, one is no function, or has no name.
    """
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(given or ()):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            raise wrong(f"{where}.type", "must be 'function'")
        string_in(tool, "name", where)
        if not isinstance(tool.get("parameters") or {}, Mapping):
            raise wrong(f"{where}.parameters", "must be an object")
        function = {name: tool[name] for name in _TOOL_FIELDS if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools_from(tools)


class OutputItems:
    """The items of one reply, and the events that tell of them.

    Attributes:
        items: [reasoning, message, calls of tools], those that there are.
    """

    def __init__(self, response_id: str, tell: Tell, *, with_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._suffix = response_id.partition("_")[2]
        self._tell = tell
        self._with_logprobs = with_logprobs
        self._part: dict[str, Any] | None = None  # of the item that is being told of
        self._logprobs: list[dict[str, Any]] = []

    def take(self, delta: Delta, logprobs: Sequence[dict[str, Any]]) -> None:
        """
        Args:
            logprobs: of the tokens of this delta. Those of a whole reply are its text's.
        """
        self._logprobs += logprobs
        if delta.reasoning:
            if not self._is_open("reasoning"):
                self._open("rs", {"type": "reasoning", "summary": [], "content": []}, "reasoning_text")
            self._add_text("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            self._open_message()
            more = {"logprobs": self._logprobs_now()}
            self._add_text("response.output_text.delta", delta.content, **more)
        for call in delta.tool_calls:
            self._call(call)

    def end(self, status: str) -> None:
        """
        Args:
            status: of the item that is not whole yet: "completed" or "incomplete".
        """
        if not self.items:
            self._open_message()
        self._close(status)

    def _open_message(self) -> None:
        if not self._is_open("message"):
            part = {"annotations": []} | ({"logprobs": []} if self._with_logprobs else {})
            self._open("msg", {"type": "message", "role": "assistant", "content": []}, "output_text", **part)

    def _is_open(self, kind: str) -> bool:
        return self._part is not None and self.items[-1]["type"] == kind

    def _open(self, prefix: str, item: dict[str, Any], part: str, **more: Any) -> None:
        self._begin(prefix, item)
        self._part = {"type": part, "text": "", **more}
        self._tell("response.content_part.added", {**self._at(), "content_index": 0, "part": dict(self._part)})

    def _begin(self, prefix: str, item: dict[str, Any]) -> None:
        self._close("completed")
        number = len(self.items)
        self.items.append({"id": f"{prefix}_{self._suffix}{number:02d}", "status": "in_progress", **item})
        self._tell("response.output_item.added", {"output_index": number, "item": dict(self.items[-1])})

    def _add_text(self, kind: str, text: str, **more: Any) -> None:
        assert self._part is not None
        self._part["text"] += text
        self._tell(kind, {**self._at(), "content_index": 0, "delta": text, **more})

    def _logprobs_now(self) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        told, self._logprobs = self._logprobs, []
        assert self._part is not None
        self._part["logprobs"] += told
        return told

    def _close(self, status: str) -> None:
        if self._part is None:
            return
        item, part = self.items[-1], self._part
        if item["type"] == "message":
            self._logprobs_now()
            more = {"logprobs": part.get("logprobs", [])}
            self._tell("response.output_text.done", {**self._at(), "content_index": 0, "text": part["text"], **more})
        else:
            self._tell("response.reasoning_text.done", {**self._at(), "content_index": 0, "text": part["text"]})
        self._tell("response.content_part.done", {**self._at(), "content_index": 0, "part": part})
        item["content"], item["status"], self._part = [part], status, None
        self._tell("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})

    def _call(self, call: Mapping[str, Any]) -> None:
        function = call["function"]
        self._begin("fc", {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": ""})
        arguments = function["arguments"]
        self._tell("response.function_call_arguments.delta", {**self._at(), "delta": arguments})
        done = {**self._at(), "name": function["name"], "arguments": arguments}
        self._tell("response.function_call_arguments.done", done)
        item = self.items[-1]
        item["arguments"], item["status"] = arguments, "completed"
        self._tell("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})

    def _at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _add_message(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    content = text_in(item.get("content"), f"{where}.content", TEXT_PARTS)
    if item.get("role") == "assistant":
        _reply(messages, "content", "tool_calls")["content"] = content
        return
    role = string_in(item, "role", where)
    if role not in ("user", "system", "developer"):
        raise wrong(f"{where}.role", "must be one of user, assistant, system, developer")
    messages += messages_from([{"role": role, "content": content}])


def _reply(messages: list[Message], *taken: str) -> dict[str, Any]:
    """The reply that is being said, or a new one where it says one of these already."""
    if not messages or messages[-1].get("role") != "assistant" or any(messages[-1].get(name) for name in taken):
        messages.append({"role": "assistant", "content": ""})
    last = messages[-1]
    assert isinstance(last, dict)
    return last


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary")
    name = "content" if item.get("content") else "summary"
    return text_in(parts, f"{where}.{name}", ("reasoning_text", "summary_text"))


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {"name": string_in(item, "name", where), "arguments": string_in(item, "arguments", where)}
    return {"id": string_in(item, "call_id", where), "type": "function", "function": function}
