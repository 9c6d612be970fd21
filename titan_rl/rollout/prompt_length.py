"""Length of prompts in tokens, found without tokenizing all of a long text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from titan_rl.rollout.renderer.text import prompt_ids
from titan_rl.rollout.renderer.types import Renderer, content_of
from titan_rl.rollout.types import Message

LONGEST_TOKEN = 256
"""Largest number of characters in a token. The vocabularies in use have at most 128."""

USUAL_TOKEN = 8
"""Number of characters of a token that texts rarely exceed on average."""

UNBOUNDED = 1 << 60


def num_characters(messages: Sequence[Message]) -> int:
    return sum(len(content_of(message)) for message in messages)


def is_surely_longer(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any] | None, most: int) -> bool:
    """Whether the beginning of messages has more than `most` tokens already. A text of 4 MB takes ten seconds to
    tokenize, and each sibling of a group does."""
    size, given = num_characters(messages), None if tools is None else list(tools)
    if size > most * LONGEST_TOKEN:
        return True
    part = most * USUAL_TOKEN
    while part < size:
        try:
            num_tokens = len(prompt_ids(renderer, [*_beginning(messages, part)], given))
        except Exception:  # a template may refuse a part of a conversation
            return False
        if num_tokens > most + LONGEST_TOKEN:  # a cut may add the parts of one token
            return True
        part *= 4
    return False


class PromptLimit:
    """Test whether opening messages leave room for an answer.

    A prompt has at most as many tokens as its text has bytes, besides the template's tokens. Only if that may be too
    many, the prompt is tokenized.

    Args:
        renderer: Renderer of the prompts.
        max_context: Largest number of tokens of prompt and answer together.
        tools: Schemas of the tools that the prompts offer.

    Attributes:
        num_tested: Number of prompts that were tested.
        num_long: Number of prompts that leave no room.
    """

    def __init__(self, renderer: Renderer, max_context: int, tools: Sequence[Any] = ()) -> None:
        self.max_context = max_context
        self._renderer = renderer
        self._tools = list(tools) or None
        self.num_tested = self.num_long = 0
        self._of_template: dict[tuple[str, ...], int] = {}  # tokens of messages of one character, by their roles

    def most_tokens(self, messages: Sequence[Message]) -> int:
        """Upper bound of the number of tokens."""
        if any(set(message) != {"role", "content"} for message in messages):
            return UNBOUNDED
        roles = tuple(str(message["role"]) for message in messages)
        if (of_template := self._of_template.get(roles)) is None:
            try:
                of_template = self._num_tokens([{"role": role, "content": "x"} for role in roles])
            except Exception:  # a template may refuse such a conversation
                of_template = UNBOUNDED
            self._of_template[roles] = of_template
        return of_template + sum(len(content_of(each).encode("utf-8", "replace")) for each in messages)

    def fits(self, messages: Sequence[Message]) -> bool:
        fits = self._fits(messages)
        self.num_tested += 1
        self.num_long += not fits
        return fits

    def _fits(self, messages: Sequence[Message]) -> bool:
        if self.most_tokens(messages) < self.max_context:
            return True
        if is_surely_longer(self._renderer, messages, self._tools, self.max_context):
            return False
        return self._num_tokens(messages) < self.max_context

    def _num_tokens(self, messages: Sequence[Message]) -> int:
        return len(prompt_ids(self._renderer, messages, self._tools))


def _beginning(messages: Sequence[Message], most: int) -> Iterator[Message]:
    """First messages, with `most` characters in all if the last of them is text."""
    for message in messages:
        if most <= 0:
            return
        content = message.get("content")
        yield {**message, "content": content[:most]} if isinstance(content, str) else message
        most -= num_characters([message])
