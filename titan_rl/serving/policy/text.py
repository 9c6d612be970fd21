"""Between token ids and text, as the tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_HELD = 24
"""Tokens without text after which text is given as it stands. No character has so many."""

_LONGEST_CHARACTER = 4  # bytes, and so at most as many tokens

Decode = Callable[[Sequence[int]], str]
"""The text of tokens without the special ones."""


class Text:
    """A tokenizer of `transformers` or of `tokenizers`. It belongs to one event loop."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        added: dict[int, Any] = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the tokenizer begins a text with."""
        encoded = self._tokenizer.encode(text)
        return list(getattr(encoded, "ids", encoded))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves it out."""
        return token_id in self._special

    def piece(self, token_id: int) -> str:
        """What is shown for one token, special or not."""
        return self._backend.decode([token_id], skip_special_tokens=False)


class Detokenizer:
    """Text of tokens that come one after the other. Its pieces are the text of all of them.

    The text of a token depends on those before it: bytes of several make one character, and some decoders put spaces
    between words. So a window of tokens is decoded with and without the last ones, and what they add is their text.
    A character whose last bytes are missing is held back.

    Args:
        before: tokens whose text stands before, as of a prompt that is continued.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(before)
        self._read = len(self._window)  # tokens of the window whose text is given
        self._given = decode(self._window) if before else ""  # and that text

    def add(self, token_ids: Sequence[int]) -> str:
        """What can be told of the text with these tokens."""
        self._window += token_ids
        whole = len(self._window)
        for end in range(whole, max(self._read, whole - _LONGEST_CHARACTER), -1):
            text = self._decode(self._window[:end])
            if len(text) > len(self._given) and not text.endswith("\ufffd"):
                return self._give(text, end)
        if whole - self._read >= _HELD and len(text := self._decode(self._window)) > len(self._given):
            return self._give(text, whole)
        return ""

    def _give(self, text: str, end: int) -> str:
        """What the window has up to `end` and was not given."""
        piece = text[len(self._given) :]
        self._window, self._read = self._window[self._read :], end - self._read
        self._given = self._decode(self._window[: self._read])
        return piece

    def end(self) -> str:
        """The rest, where a character was begun and not ended."""
        return self._decode(self._window)[len(self._given) :]


class TextReader:
    """The text of a completion until the first of some strings.

    Args:
        stops: strings that end the text; they are not part of it.
        before: see `Detokenizer`.

    Attributes:
        stop: the one that was found.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(decode, before)
        self._stops = tuple(stops)
        self._held = ""  # text that may be the beginning of a stop
        self.stop: str | None = None

    def add(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """
        Returns:
            text: what can be told with these tokens.
            num_tokens: how many of them belong to the completion: less than all if it stops in one of them.
        """
        if not self._stops:
            return self._detokenizer.add(token_ids), len(token_ids)
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            text += self._until_stop(self._detokenizer.add([token_id]))
            if self.stop is not None:
                return text, count
        return text, len(token_ids)

    def end(self) -> str:
        """The rest of the text."""
        if self.stop is not None:
            return ""
        text = self._until_stop(self._detokenizer.end())
        if self.stop is None:
            text, self._held = text + self._held, ""
        return text

    def _until_stop(self, piece: str) -> str:
        if not piece:
            return ""
        text = self._held + piece
        if (end := find_stop(text, self._stops)) is not None:
            self.stop, self._held = next(stop for stop in self._stops if text.startswith(stop, end)), ""
            return text[:end]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of these strings begins in a text."""
    return min((found for stop in stops if (found := text.find(stop)) >= 0), default=None)


def _overlap(text: str, stop: str) -> int:
    """How much of the end of a text is the beginning of a stop, and not all of it."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
