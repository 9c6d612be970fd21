"""A tokenizer of a few hundred tokens for the alphabet-sort conversations.

Each first name, last name and fixed phrase of the conversations is one token; any other text falls back to its
UTF-8 bytes, so that decoding gives back exactly what was encoded. A phrase as long as an instruction is one token
too: a model of a million parameters has nothing to learn from spelling it.

Example: "AdaWolf // new name!\n" is four tokens, "Ada", "Wolf", " // new name!" and "\n".
"""

from __future__ import annotations

import re

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from examples.alphabet_sort.data import FIRST_NAMES, LAST_NAMES
from examples.alphabet_sort.env import COMBINED_TAG, FIRST_PROMPT, FIRST_TAG, LATER_PROMPT

MAX_CONTEXT = 1024
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Each message is rendered alone, so the rendering of a conversation begins with that of its beginning."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    phrases = [part for text in (FIRST_PROMPT, LATER_PROMPT) for part in re.split(r"\{\w+\}", text)]
    phrases += [f"<{tag}>\n" for tag in (FIRST_TAG, COMBINED_TAG)] + [f"</{tag}>" for tag in (FIRST_TAG, COMBINED_TAG)]
    phrases += [" // new name!", "first", "last", "system\n", "user\n", "assistant\n"]
    phrases = [phrase for phrase in dict.fromkeys(phrases) if len(phrase) > 1]  # a lone "\n" is a byte

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # BPE without merges: what the pre-tokenizer splits off is a token where the vocabulary has it, else bytes.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [byte_level.pre_tokenize_str(text)[0][0] for text in (*phrases, *FIRST_NAMES, *LAST_NAMES)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(alphabet + words)}, [], ignore_merges=True))
    longest_first = sorted(phrases, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), "[A-Z][a-z]+"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, TURN_START, TURN_END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
