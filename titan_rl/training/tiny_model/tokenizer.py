r"""Tokenizer of a few hundred tokens that has the words and phrases of a task.

Each word and fixed phrase is one token; any other text falls back to its UTF-8 bytes, so that decoding gives back
exactly what was encoded. A model of a million parameters has nothing to gain from spelling out an instruction.

Example: for texts with names, "AdaWolf // new name!\n" is four tokens, "Ada", "Wolf", " // new name!" and "\n".
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from titan_rl.training.choices import Level

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, TURN_START, TURN_END)
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HEADS = ("system\n", "user\n", "assistant\n")
"""Headers after the start of a turn. No phrase begins within a header, so that an answer has the same tokens after its
generation prompt as in a whole conversation."""
SCAFFOLD = (*HEADS, "system", "user", "assistant", "\n\n")
"""Text of the chat template itself."""

WORD = r"\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})"
"""Pattern of a word. A change of case begins a new word. Digits, and letters without case, are separate tokens."""


def build_tokenizer(texts: Iterable[str], level: Level) -> Tokenizer:
    """Build a tokenizer.

    Args:
        texts: Texts to search for words and phrases if `level` is "word".
    """
    phrases, words = _words_and_phrases(texts) if level == "word" else ([], [])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # This is BPE without merges: a piece of the pre-tokenizer is one token if the vocabulary has it, else bytes.
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [byte_level.pre_tokenize_str(text)[0][0] for text in (*phrases, *words)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, [], ignore_merges=True))
    pattern = "|".join([*map(_phrase_pattern, sorted(phrases, key=len, reverse=True)), WORD])
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


def _phrase_pattern(phrase: str) -> str:
    """Pattern that matches the phrase, except where it would end within a word."""
    return re.escape(phrase) + (r"(?!\p{Ll})" if phrase[-1].isalpha() else "")


MOST_WORDS = 8192
SELDOM = 10
"""Minimum frequency of a phrase: it occurs at least this often, and on average at least once in this many texts."""

SEED = 3
"""Largest number of pieces that identify the beginning of a run."""

Piece = str
Seed = tuple[Piece, ...]
Place = tuple[int, int]
"""Index of a text, and index of a piece in it."""


def frequent_words(pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
    """List the words, the most frequent first. Single characters are covered by bytes.  # at most [MOST_WORDS]"""
    counts = Counter(piece for text in pieces for piece in text if len(piece) > 1)
    return [word for word, _ in counts.most_common(MOST_WORDS)]


def fixed_phrases(pieces: Sequence[Sequence[Piece]], num_texts: int) -> list[Piece]:
    """Find runs of pieces that always continue in the same way, such as those of an instruction.

    A run begins with up to `SEED` pieces, and extends as long as all its occurrences are followed by the same piece.
    A run whose rest also follows another first piece is left out: the rest is fixed, but not a name before it.

    Args:
        pieces: Pieces of each part of a text: words, and single characters of anything else.
        num_texts: Number of texts.

    Example: in "What is 3 + 4?", "What is 2 + 9?" and more questions of this form, "What is " is a phrase.
    """
    least = max(SELDOM, num_texts / SELDOM)
    occurrences_of = _seeds(pieces)
    runs: list[Sequence[Piece]] = []
    # Places of the first occurrence of each run, with the number of its occurrences.
    within: set[tuple[Place, int]] = set()
    frequent = [(seed, places) for seed, places in occurrences_of.items() if len(places) >= least]
    for seed, occurrences in sorted(frequent, key=lambda each: each[1][0]):
        number, at = occurrences[0]
        if ((number, at), len(occurrences)) in within:
            continue
        length = _length(pieces, occurrences, len(seed))
        run = pieces[number][at : at + length]
        if length < len(seed) + 2 or _count(pieces, occurrences_of, run[1:]) > len(occurrences):
            continue
        within |= {((number, at + offset), len(occurrences)) for offset in range(length)}
        runs.append(run)
    return list(dict.fromkeys("".join(run) for run in runs))


def _count(
    pieces: Sequence[Sequence[Piece]], occurrences_of: Mapping[Seed, Sequence[Place]], run: Sequence[Piece]
) -> int:
    occurrences = occurrences_of[tuple(run[:SEED])]
    return sum(pieces[number][at : at + len(run)] == run for number, at in occurrences)


def _seeds(pieces: Sequence[Sequence[Piece]]) -> dict[Seed, list[Place]]:
    """Places of each possible beginning of a run, the shortest beginnings first."""
    occurrences_of: dict[Seed, list[Place]] = defaultdict(list)
    for length in range(1, SEED + 1):
        for number, text in enumerate(pieces):
            for at in range(len(text) - length + 1):
                occurrences_of[tuple(text[at : at + length])].append((number, at))
    return occurrences_of


def _length(pieces: Sequence[Sequence[Piece]], occurrences: Sequence[Place], length: int) -> int:
    """Number of pieces of the run that begins at each of these places. It is at least `length`."""
    while True:
        ends = (at + length for _, at in occurrences)
        following = {tuple(pieces[number][end : end + 1]) for (number, _), end in zip(occurrences, ends, strict=True)}
        if len(following) > 1 or following == {()}:
            return length
        length += 1
