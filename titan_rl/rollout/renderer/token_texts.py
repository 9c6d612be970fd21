"""What each of some tokens adds to their text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from titan_rl.rollout.renderer.detokenizer import Decode, Detokenizer

_REMEMBERED = 1 << 16
_NO_CHARACTER = "\ufffd"  # stands for the bytes of a part


class TokenTexts:
    """Texts of tokens one by one, which joined are the text of all of them.

    A character whose bytes lie in several tokens is in the last of them; the others have no text.

    Example: with a tokenizer of bytes `of([72, 195, 169])` is `["H", "", "é"]`.

    Args:
        decode: of tokens, special ones shown.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._alone: dict[int, str] = {}

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> TokenTexts:
        """Of one of `transformers` or of `tokenizers`, which no other thread uses."""
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        return cls(lambda token_ids: backend.decode(list(token_ids), skip_special_tokens=False))

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """
        Raises:
            Exception: of the tokenizer, for what is no token of it.
        """
        texts = [self._of_one(token_id) for token_id in token_ids]
        place = 0
        for is_part, run in groupby(texts, lambda text: _NO_CHARACTER in text):
            length = len(list(run))
            if is_part:
                texts[place : place + length] = self._in_turn(token_ids[place : place + length])
            place += length
        return texts if "".join(texts) == self._decode(token_ids) else self._in_turn(token_ids)

    def _in_turn(self, token_ids: Sequence[int]) -> list[str]:
        """Of tokens whose texts depend on those before, which takes ten times as long."""
        detokenizer = Detokenizer(self._decode)
        texts = [detokenizer.add([token_id]) for token_id in token_ids]
        if texts:
            texts[-1] += detokenizer.end()
        return texts

    def _of_one(self, token_id: int) -> str:
        text = self._alone.get(token_id)
        if text is None:
            text = self._decode([token_id])
            if len(self._alone) < _REMEMBERED:
                self._alone[token_id] = text
        return text
