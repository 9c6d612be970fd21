"""Conversion between tokens and text: decoding of streams up to stop strings, and tokenizing in a thread."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar, cast

from titan_rl.rollout.renderer.tokenizer import Decode, Detokenizer

THINK, THINK_END = "<think>", "</think>"
"""Markup around the reasoning of a reply."""

_REMEMBERED_TOKENS = 1 << 16
"""Number of tokens whose text is cached: a stream of single tokens decodes each token twice."""


class Text:
    """Tokenizer of `transformers` or `tokenizers`. Belongs to one event loop."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        added: dict[int, Any] = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._markup = {token.content: token_id for token_id, token in sorted(added.items())}
        self._decode_one = lru_cache(_REMEMBERED_TOKENS)(lambda token_id: self._decode([token_id]))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text.

        Args:
            add_special_tokens: Whether to add the special tokens that the tokenizer places around a text.
        """
        plain = {} if add_special_tokens else {"add_special_tokens": False}
        encoded = self.tokenizer.encode(text, **plain)
        return list(getattr(encoded, "ids", encoded))

    def shown(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, including special tokens."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def markup(self) -> list[str]:
        """Return tokens that are not part of texts, such as `<think>` and `<|im_end|>`: the first 64 that the tokenizer
        adds to its vocabulary."""
        return list(islice(self._markup, 64))

    def token_of(self, markup: str) -> int:
        """Return the id of an added token by its text."""
        return self._markup[markup]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens without special tokens."""
        return self._decode_one(token_ids[0]) if len(token_ids) == 1 else self._decode(list(token_ids))

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=True)

    def is_special(self, token_id: int) -> bool:
        """Return whether `decode` leaves a token out."""
        return token_id in self._special

    def piece(self, token_id: int) -> str:
        """Return the text of one token, special or not."""
        return self._backend.decode([token_id], skip_special_tokens=False)


class TextReader:
    """Decodes a completion up to the first of some stop strings.

    Args:
        stops: Strings that end the text. They are not part of it.
        before: Tokens before the completion; see `Detokenizer`.

    Attributes:
        stop: Stop string that was found; None while there is none.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(decode, before)
        self._stops = tuple(stops)
        self._held = ""  # text that may be the beginning of a stop
        self.stop: str | None = None

    def add(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Decode the next tokens.

        Returns:
            text: Text that is certain with these tokens.
            num_tokens: Number of these tokens that belong to the completion: fewer than all if a stop string ends
                within them.
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
        """Return the rest of the text, at the end of the completion."""
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
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Position of the first stop string in a text; None if there is none."""
    return min((found for stop in stops if (found := text.find(stop)) >= 0), default=None)


def overlap(text: str, stop: str) -> int:
    """Length of the end of a text that is a proper prefix of a stop string."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)


logger = logging.getLogger(__name__)
T = TypeVar("T")

SHORT = 1 << 16
"""Number of characters that are tokenized within some milliseconds, for which the event loop can wait."""


class Tokenizing:
    """Calls that tokenize: short ones run at once, long ones in a thread, one after another. A call that is cancelled
    while it runs returns nothing.

    No tokenizer or renderer may be used by two threads at once. The thread therefore has its own copies, and calls must
    use the objects that `own` returns. If an object cannot be copied, short calls wait for a long one.

    Example:

        tokenizing = Tokenizing()
        tokenizer = tokenizing.own(tokenizer)
        token_ids = await tokenizing(lambda: tokenizer.encode(text), len(text))
    """

    def __init__(self) -> None:
        self._owned: list[Any] = []
        self._of_thread = threading.local()
        self._originals_in_use = threading.Lock()
        self._can_copy = True
        self._thread = ThreadPoolExecutor(1, "tokenizing")

    def own(self, used: T) -> T:
        """Return a proxy of a tokenizer or renderer for use in calls: the original on the event loop, a copy in the
        thread."""
        if isinstance(used, _Owned):
            return used
        self._owned.append(used)
        return cast("T", _Owned(self, len(self._owned) - 1))

    def held(self, used: T) -> T:
        """Return the object that the current thread uses for a proxy returned by `own`."""
        return cast("T", self.present(used.index)) if isinstance(used, _Owned) else used

    def present(self, index: int) -> Any:
        """Return the current thread's object with this index."""
        return getattr(self._of_thread, "copies", self._owned)[index]

    async def __call__(self, call: Callable[[], T], num_characters: int) -> T:
        if num_characters <= SHORT and self._originals_in_use.acquire(blocking=False):
            try:
                return call()
            finally:
                self._originals_in_use.release()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._aside, call)

    def _aside(self, call: Callable[[], T]) -> T:
        with self._originals_in_use:
            if not self._has_copies():
                return call()
        return call()

    def _has_copies(self) -> bool:
        if self._can_copy and not hasattr(self._of_thread, "copies"):
            try:
                self._of_thread.copies = copy.deepcopy(self._owned)  # together: a renderer may hold the tokenizer
            except Exception as error:  # a user's renderer may hold anything
                logger.info(
                    "short texts wait while long ones are tokenized, because the tokenizer cannot be copied: %r", error
                )
                self._can_copy = False
        return self._can_copy


class _Owned:
    def __init__(self, tokenizing: Tokenizing, index: int) -> None:
        self._tokenizing = tokenizing
        self.index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizing.present(self.index), name)
