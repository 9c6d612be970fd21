"""A model whose every byte is a token, and whose answers a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
import transformers
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
VOCAB = 256 + len(SPECIAL) + len(MARKUP)


def byte_tokenizer() -> Any:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(MARKUP)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE, name_or_path="byte-qwen3"
    )


def qwen3(tokenizer: Any) -> Any:
    return Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=True))


def script(tokenizer: Any, answer: Callable[[str], str]) -> Callable[[Sequence[int]], int]:
    """A `ScriptedEngine`'s script that says `answer(what the last message was)`, and its end."""
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
