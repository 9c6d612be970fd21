"""Model whose tokens are bytes, with answers that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from byte_tokenizer import VOCAB, byte_tokenizer
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

__all__ = ["VOCAB", "byte_tokenizer", "qwen3", "script"]


def qwen3(tokenizer: Any) -> Any:
    return Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=True))


def script(tokenizer: Any, answer: Callable[[str], str]) -> Callable[[Sequence[int]], int]:
    """Make a script for `ScriptedEngine` that generates `answer(last message)` and a stop token."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    header = [start, *tokenizer.encode("assistant\n", add_special_tokens=False)]

    def next_token(context: Sequence[int]) -> int:
        context = list(context)
        begin = max(i for i in range(len(context)) if context[i : i + len(header)] == header)
        last = tokenizer.decode(context[:begin]).rpartition("<|im_start|>")[2]
        asked = last.partition("\n")[2].removesuffix("<|im_end|>\n")
        reply = [*tokenizer.encode(answer(asked), add_special_tokens=False), end]
        said = len(context) - begin - len(header)
        return reply[min(said, len(reply) - 1)]

    return next_token
