"""The text of tokens, as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HELD = 24
"""Tokens without text after which text is given as it stands. No character has so many."""

_LONGEST_CHARACTER = 4  # bytes, and so at most as many tokens

Decode = Callable[[Sequence[int]], str]
"""The text of tokens."""


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
