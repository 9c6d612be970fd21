"""Text of the policy: an answer as it was written, and its two parts, the thought and the answer that follows."""

from __future__ import annotations

from collections.abc import Sequence

from titan_rl.rollout.renderer.text import prefix_text, split_prefix
from titan_rl.rollout.renderer.thoughts import join_thought, split_thought, without_empty_thought
from titan_rl.rollout.renderer.types import content_of
from titan_rl.rollout.types import Message, Rollout

WRITTEN = "written"
"""Key of a message with its text as the policy wrote it. It is left out if `content` and `reasoning_content`, joined in
the usual form, are the same text."""

PREFIX = "prefix"
"""Key that marks a message of the assistant as the beginning of the next one, given by the environment. Mistral's and
DeepSeek's servers have the same key."""


class PolicyText(str):
    """Text that the policy wrote in one message, as a `str` with its parts as attributes.

    Example: "<think>2 + 3</think>5" has the thought "2 + 3" and the answer "5".

    Args:
        text: The whole text.
        answer: Text after the thought; "" if the thought does not end. By default both parts are found in the text.
        thought: Text of the thought; "" without one.
    """

    answer: str
    thought: str

    def __new__(cls, text: str = "", answer: str | None = None, thought: str = "") -> PolicyText:
        self = super().__new__(cls, text)
        if answer is None:
            found, answer = split_thought(text)
            thought = found or ""
        self.answer, self.thought = answer or "", thought
        return self


Source = Rollout | Message | str
"""A rollout, whose last message of the policy is read; a message; or a text."""


def text_of(source: Source) -> PolicyText:
    """Text of the last message that the policy wrote, with its thought; empty if there is none.

    Tool calls are not part of it; a message has them as `tool_calls`.
    """
    if isinstance(source, str):
        return source if isinstance(source, PolicyText) else PolicyText(source)
    message = last_answer(source) if isinstance(source, Rollout) else source
    if message is None:
        return PolicyText()
    answer, thought = content_of(message), str(message.get("reasoning_content") or "").strip()
    return PolicyText(message.get(WRITTEN) or join_thought(thought, answer), answer, thought)


def answer_of(source: Source) -> str:
    """Text of the last message that the policy wrote, without its thought; empty if there is none, or if the thought
    does not end."""
    return text_of(source).answer


def thought_of(source: Source) -> str:
    """Thought of the last message that the policy wrote; empty if there is none."""
    return text_of(source).thought


def last_answer(rollout: Rollout) -> Message | None:
    """Last message that the policy wrote."""
    written = (each for each in reversed(rollout.messages) if each.get("role") == "assistant" and not each.get(PREFIX))
    return next(written, None)


def with_written(message: Message, text: str) -> Message:
    """Message with its text as the policy wrote it, if it does not follow from its parts."""
    text = without_empty_thought(text)
    return message if message.get("tool_calls") or text_of(message) == text else {**message, WRITTEN: text}


def with_prefix_marked(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages of an environment, of which the last is marked if it is the beginning of the policy's answer."""
    complete, prefix = split_prefix(messages)
    return messages if prefix is None else [*complete, {**prefix, PREFIX: True}]


def joined(messages: Sequence[Message]) -> list[Message]:
    """Messages without the keys of this module, in which the beginning of an answer and its continuation are one
    message."""
    found: list[Message] = []
    was_prefix = False
    for message in messages:
        plain = {name: value for name, value in message.items() if name not in (WRITTEN, PREFIX)}
        is_prefix, is_rest = bool(message.get(PREFIX)), was_prefix and message.get("role") == "assistant"
        if is_prefix or is_rest:
            text = prefix_text(message) if is_prefix else text_of(message)
            plain["content"] = f"{found.pop()['content']}{text}" if is_rest else text
            plain.pop("reasoning_content", None)
        found.append(plain)
        was_prefix = is_prefix
    return found


def continuing(messages: Sequence[Message]) -> dict[str, bool]:
    """Fields of a request to a chat endpoint of vLLM, if its last message is the beginning of the reply."""
    is_begun = split_prefix(messages)[1] is not None
    return {"continue_final_message": True, "add_generation_prompt": False} if is_begun else {}
