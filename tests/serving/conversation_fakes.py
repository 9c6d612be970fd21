"""Messages, completions and a renderer for tests of conversations and episodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.rollout.renderer.chat_template import ParsedText, PromptTokens
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

BASE = Path(__file__).parents[2] / "examples" / "alphabet_sort" / "base"
SAMPLING = SamplingParams(max_tokens=16)
SYSTEM = {"role": "system", "content": "Sort."}


@cache
def chat_template_renderer() -> ChatTemplateRenderer:
    return ChatTemplateRenderer.from_pretrained(BASE)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def completion(token_ids: Sequence[int] = (5, 6, 7), request_id: str = "r", version: int = 0) -> Completion:
    ids = list(token_ids)
    return Completion(request_id, ids, [-0.5] * len(ids), FinishReason.STOP, [VersionSpan(version, len(ids))])


class Forgetful:
    """Renderer whose prompts are not prefixes of later prompts: it renders the number of messages, and the reasoning of
    the last reply only. Only tool results extend a turn."""

    STOP = 0

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        ids = [len(messages), len(tools or ())]
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        for i, message in enumerate(messages):
            ids += self._message(message)
            if i == last:
                ids += map(ord, message.get("reasoning_content") or "")
        return ids

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedText:
        ids = [token for token in token_ids if token != self.STOP]
        return ParsedText("".join(map(chr, ids[1:])), reasoning_content="".join(map(chr, ids[:1])))

    def get_stop_token_ids(self) -> list[int]:
        return [self.STOP]

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> PromptTokens | None:
        if any(message["role"] != "tool" for message in new_messages):
            return None
        new = [token for message in new_messages for token in self._message(message)]
        return PromptTokens([*previous_prompt_ids, *previous_completion_ids, *new])

    def _message(self, message: Any) -> list[int]:
        return [ord(message["role"][0]), *map(ord, message["content"]), self.STOP]
