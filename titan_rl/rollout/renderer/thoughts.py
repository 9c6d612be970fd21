"""Thoughts in the text of an answer: their marks, and where they end."""

from __future__ import annotations

import re

THINK, THINK_END = "<think>", "</think>"
"""Marks of the thought at the beginning of an answer."""

_EMPTY = re.compile(rf"\s*{THINK}\s*{THINK_END}\s*")


def split_thought(text: str, *, is_begun: bool = False) -> tuple[str | None, str | None]:
    r"""Divide the text of an answer.

    >>> split_thought("<think>\n2 + 3\n</think>\n\n5")
    ('2 + 3', '5')
    >>> split_thought("<think>2 + 3")
    ('2 + 3', None)

    Args:
        text: Text of the answer.
        is_begun: Whether the prompt has begun the thought.

    Returns:
        The thought, or None without one; and the answer after it, or None if the thought does not end.
    """
    thought, mark, answer = text.rpartition(THINK_END)
    if mark:
        return thought.strip().removeprefix(THINK).strip(), answer.lstrip("\n")
    if is_begun or text.lstrip().startswith(THINK):
        return text.strip().removeprefix(THINK).strip(), None
    return None, text


def join_thought(thought: str, answer: str | None) -> str:
    """Text of an answer in the usual form, the counterpart of `split_thought`."""
    if answer is None:
        return f"{THINK}\n{thought}"
    return f"{THINK}\n{thought}\n{THINK_END}\n\n{answer}" if thought else answer


def without_empty_thought(text: str) -> str:
    """Text of an answer without a thought that is empty. Templates such as Qwen3's begin every answer with one, so it
    says nothing about what the policy decided to write."""
    return text[match.end() :] if (match := _EMPTY.match(text)) else text
