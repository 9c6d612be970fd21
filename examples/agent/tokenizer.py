"""A tokenizer of a few hundred tokens for the agent's conversations.

Each name, town and fixed phrase is one token, the description of a tool in the prompt too; any other text falls back
to its UTF-8 bytes.

Example: '{"name": "manager_of", "arguments": {"name": "Mia"}}' is five tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from renderers.qwen3 import Qwen3Renderer
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from examples.agent.company import MANAGER_OF, NAMES, PERSON, TOWN, TOWNS

MAX_CONTEXT = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def build_tokenizer(instructions: str, tools: Sequence[dict[str, Any]]) -> PreTrainedTokenizerFast:
    """
    Args:
        tools: as they come in a request for a chat completion.
    """
    in_bytes: Any = _tokenizer([])
    renderer: Any = Qwen3Renderer(in_bytes)
    head = renderer.render_ids([{"role": "system", "content": instructions}], tools=list(tools))
    marks = "|".join(map(re.escape, (*SPECIAL, *MARKUP)))
    lines = [line for part in re.split(marks, in_bytes.decode(head)) for line in part.splitlines()]
    answers = [PERSON, TOWN, MANAGER_OF, "no such person", "nobody", *NAMES, *TOWNS]
    call = ['{"name": "', '", "arguments": {"name": "', '"}}', *(tool["function"]["name"] for tool in tools)]
    phrases = [*lines, *answers, *call, "system", "user", "assistant"]
    return _tokenizer([phrase for phrase in dict.fromkeys(phrases) if len(phrase) > 1])


def _tokenizer(phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # BPE without merges: what the pre-tokenizer splits off is a token where the vocabulary has it, else bytes.
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [byte_level.pre_tokenize_str(phrase)[0][0] for phrase in phrases]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, [], ignore_merges=True))
    longest_first = "|".join(map(re.escape, sorted(phrases, key=len, reverse=True)))
    splits = [pre_tokenizers.Split(Regex(longest_first), behavior="isolated")] if phrases else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(MARKUP))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
