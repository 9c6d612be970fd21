"""Replies in each message protocol, whole and streamed, and the next messages of their clients."""

from __future__ import annotations

import json
from typing import Any

Said = tuple[str, str, list[tuple[str, Any]]]  # reasoning, content, and calls: name and arguments


class Chat:
    path = "/v1/chat/completions"

    def body(self, items: list[Any]) -> dict[str, Any]:
        return {"messages": items, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}

    def whole(self, answer: Any) -> list[Any]:
        return [answer["choices"][0]["message"]]

    def streamed(self, events: list[Any]) -> list[Any]:
        deltas = [event["choices"][0]["delta"] for event in events]
        texts = {name: "".join(d.get(name) or "" for d in deltas) for name in ("content", "reasoning_content")}
        return [{"role": "assistant", **texts, "tool_calls": [c for d in deltas for c in d.get("tool_calls", ())]}]

    def said(self, items: list[Any]) -> Said:
        (message,) = items
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        arguments = [(call["name"], json.loads(call["arguments"])) for call in calls]
        return message.get("reasoning_content") or "", message["content"] or "", arguments

    def answers(self, items: list[Any]) -> list[Any]:
        """Messages that follow the reply: results of its tool calls, or a user message."""
        calls = items[0].get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
        return results or [{"role": "user", "content": "more"}]


class Messages:
    path = "/v1/messages"

    def body(self, items: list[Any]) -> dict[str, Any]:
        return {"messages": items, "max_tokens": 1000, "tools": [{"name": "f", "input_schema": {}}]}

    def whole(self, answer: Any) -> list[Any]:
        return [{"role": "assistant", "content": answer["content"]}]

    def streamed(self, events: list[Any]) -> list[Any]:
        blocks: list[Any] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                for name in {"text", "thinking"} & set(event["delta"]):
                    blocks[-1][name] += event["delta"][name]
                if "partial_json" in event["delta"]:
                    blocks[-1]["input"] = json.loads(event["delta"]["partial_json"])
        return [{"role": "assistant", "content": blocks}]

    def said(self, items: list[Any]) -> Said:
        blocks = items[0]["content"]
        thinking, text = ("".join(block.get(name, "") for block in blocks) for name in ("thinking", "text"))
        return thinking, text, [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]

    def answers(self, items: list[Any]) -> list[Any]:
        uses = [block["id"] for block in items[0]["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use, "content": "r"} for use in uses]
        return [{"role": "user", "content": results or "more"}]


class Responses:
    path = "/v1/responses"

    def body(self, items: list[Any]) -> dict[str, Any]:
        return {"input": items, "tools": [{"type": "function", "name": "f", "parameters": {}}]}

    def whole(self, answer: Any) -> list[Any]:
        return answer["output"]

    def streamed(self, events: list[Any]) -> list[Any]:
        output = events[-1]["response"]["output"]
        said = self.said(output)
        for kind, text in (("reasoning_text", said[0]), ("output_text", said[1])):
            assert "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta") == text
        return output

    def said(self, items: list[Any]) -> Said:
        texts = dict.fromkeys(("reasoning", "message"), "")
        for item in items:
            if item["type"] in texts:
                texts[item["type"]] += "".join(part["text"] for part in item["content"])
        calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
        return texts["reasoning"], texts["message"], calls

    def answers(self, items: list[Any]) -> list[Any]:
        calls = [item["call_id"] for item in items if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": "r"} for call in calls]
        return results or [{"role": "user", "content": "more"}]


PROTOCOLS: tuple[Any, ...] = (Chat(), Messages(), Responses())
