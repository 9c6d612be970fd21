"""Text of completions, with the tokenizer of a renderer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan_rl.rollout.renderer.renderers_package import package_tokenizer
from titan_rl.rollout.renderer.thoughts import THINK, THINK_END, join_thought
from titan_rl.rollout.renderer.types import ParsedResponse, Renderer


def tokenizer_of(renderer: Renderer) -> Any | None:
    """Tokenizer of a renderer; None if it has none."""
    return getattr(renderer, "tokenizer", None) or package_tokenizer(renderer)


def written_text(renderer: Renderer, completion_ids: Sequence[int], parsed: ParsedResponse | None = None) -> str | None:
    """Text of a completion as the policy wrote it, without stop tokens and other special tokens.

    Marks of a thought that are special tokens become `<think>` and `</think>`: the text of gpt-oss, for example, would
    otherwise not show where its thought ends.

    Args:
        parsed: Parts of the completion; None if it cannot be parsed.

    Returns:
        The text; None if the renderer has no tokenizer.
    """
    if (tokenizer := tokenizer_of(renderer)) is None:
        return None
    ids, stops = list(completion_ids), renderer.get_stop_token_ids()
    while ids and ids[-1] in stops:
        ids.pop()
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    thought = "" if parsed is None else (parsed.reasoning_content or "").strip()
    is_marked = THINK in text or THINK_END in text or text.strip() == thought
    if parsed is None or not thought or is_marked or text == tokenizer.decode(ids, skip_special_tokens=False):
        return text
    return join_thought(thought, None if parsed.reasoning_complete is False else parsed.content)
