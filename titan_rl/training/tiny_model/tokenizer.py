"""A tokenizer of a few hundred tokens.

Each word and fixed phrase is one token; any other text falls back to its UTF-8 bytes, so that decoding gives back
exactly what was encoded. A model of a million parameters has nothing to learn from spelling an instruction.

Example: for texts of names, "AdaWolf // new name!\\n" is four tokens, "Ada", "Wolf", " // new name!" and "\\n".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from titan_rl.training.tiny_model.vocabulary import Level, fixed_phrases, frequent_words

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, TURN_START, TURN_END)
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HEADS = ("system\n", "user\n", "assistant\n")
"""What follows the start of a turn. No phrase begins within one, so that an answer's tokens are the same behind what
asks for it as in a whole conversation."""
SCAFFOLD = (*HEADS, "system", "user", "assistant", "\n\n")
"""Text of the chat template itself."""

WORD = r"\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})"
"""A case change begins another word. Digits, and letters that have no case, stand alone."""


def build_tokenizer(texts: Iterable[str], level: Level) -> Tokenizer:
    """
    Args:
        texts: looked through for words and phrases where `level` is "word".
    """
    phrases, words = _words_and_phrases(texts) if level == "word" else ([], [])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # BPE without merges: what the pre-tokenizer splits off is a token where the vocabulary has it, else bytes.
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [byte_level.pre_tokenize_str(text)[0][0] for text in (*phrases, *words)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, [], ignore_merges=True))
    pattern = "|".join([*map(_whole, sorted(phrases, key=len, reverse=True)), WORD])
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")] if level == "word" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(MARKUP))
    return tokenizer


def _words_and_phrases(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    heads = [f"{TURN_START}{head}" for head in HEADS]
    marks = re.compile("|".join(map(re.escape, (*heads, *SPECIAL, *MARKUP))))
    split = pre_tokenizers.Split(Regex(rf"{WORD}|\s|\S"), behavior="isolated")
    texts = list(texts)
    parts = (part for text in texts for part in marks.split(text) if part)
    pieces = [[piece for piece, _ in split.pre_tokenize_str(part)] for part in parts]
    phrases = list(dict.fromkeys([*SCAFFOLD, *fixed_phrases(pieces, len(texts))]))
    taken = set(phrases)
    return phrases, [word for word in frequent_words(pieces) if word not in taken]


def _whole(phrase: str) -> str:
    """A pattern for the phrase where it does not end within a word."""
    return re.escape(phrase) + (r"(?!\p{Ll})" if phrase[-1].isalpha() else "")
