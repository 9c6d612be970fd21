"""Tokenizer of UTF-8 bytes with the special tokens and the markup of Qwen3, built without files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers
import transformers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCAB = 256 + len(SPECIAL) + len(MARKUP)
CHATML = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def byte_tokenizer(
    chat_template: str | None = CHATML, *, special: Sequence[str] = SPECIAL, eos: str = "<|im_end|>"
) -> Any:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.add_tokens(MARKUP)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, chat_template=chat_template, name_or_path="byte-qwen3"
    )
