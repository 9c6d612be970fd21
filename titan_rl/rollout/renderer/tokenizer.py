"""Tokenizer and stop tokens of a model's folder, and the text of tokens as they stream or one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import MissingExtraError, ModelError
from titan_rl.rollout.renderer.plain_tokenizer import PlainTokenizer

_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""Key of a warning of transformers that is suppressed, because model.max_context is the limit."""

_SHORT = 32
"""Largest number of characters of a text whose tokens are cached."""
_REMEMBERED_TEXTS = 1024

_FILES = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.*", "spiece.model")


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a Hugging Face folder, for code that uses no more of it than `PlainTokenizer` has.
    transformers is not imported for a folder that can be read without it.

    Raises:
        ModelError: the folder is missing, or has no tokenizer that can be loaded.
        MissingExtraError: tokenizers or transformers is not installed.
    """
    folder = _folder_with_tokenizer(path)
    try:
        plain = PlainTokenizer.of_folder(folder)
    except ImportError as error:
        raise MissingExtraError("tokenizers", "cpu") from error
    return load_transformers_tokenizer(path) if plain is None else plain


def load_transformers_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a Hugging Face folder as an object of transformers, as users' code expects.

    Raises:
        ModelError: the folder is missing, or has no tokenizer that can be loaded.
        MissingExtraError: transformers is not installed.
    """
    folder = _folder_with_tokenizer(path)
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "cpu") from error
    try:
        loader: Any = transformers.TokenizersBackend if _needs_no_class(folder) else transformers.AutoTokenizer
        tokenizer = loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many types here
        raise ModelError(f"the tokenizer in model folder {str(path)!r} cannot be loaded: {error}") from error
    tokenizer.deprecation_warnings[_TOO_LONG] = True
    _remember_short_texts(tokenizer)
    return tokenizer


def _folder_with_tokenizer(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"model folder {str(path)!r} does not exist")
    if not any(path for pattern in _FILES for path in folder.glob(pattern)):
        raise ModelError(f"model folder {str(path)!r} has no tokenizer (such as tokenizer.json)")
    return folder


def _remember_short_texts(tokenizer: Any) -> None:
    """Make `encode` cache short texts: renderers encode the same headers with every message, which otherwise takes a
    quarter of a rollout's processor time."""
    encode: Callable[..., list[int]] = tokenizer.encode

    @lru_cache(_REMEMBERED_TEXTS)
    def encode_once(text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(encode(text, add_special_tokens=add_special_tokens))

    def encode_short(text: Any, *others: Any, add_special_tokens: bool = True, **settings: Any) -> list[int]:
        if others or settings or not isinstance(text, str) or len(text) > _SHORT:
            return encode(text, *others, add_special_tokens=add_special_tokens, **settings)
        return list(encode_once(text, add_special_tokens))

    tokenizer.encode = encode_short


def _needs_no_class(folder: Path) -> bool:
    """Whether the tokenizer has no special class. Searching for one makes transformers import torch, which costs
    seconds in every process that renders."""
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return False
    settings = parse_json(config.read_text())
    return settings.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in settings


def folder_stop_token_ids(tokenizer: Any) -> list[int]:
    """All tokens that end an answer according to the folder of a tokenizer, in increasing order.

    They are read from generation_config.json, or from config.json if it names none. Tokens that are ordinary text are
    left out, because configs of transformers have defaults that do not fit every vocabulary.

    Example: `[128001, 128008, 128009]` for Llama 3.2, with `<|eom_id|>` and `<|eot_id|>`.

    Raises:
        ModelError: the file is not a JSON object, or its eos_token_id is neither a token id nor a list of token ids.
    """
    folder = Path(str(getattr(tokenizer, "name_or_path", "") or ""))
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    for file in (folder / "generation_config.json", folder / "config.json"):
        if not file.is_file():
            continue
        try:
            settings: Any = parse_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{file} is not JSON: {error}") from error
        if not isinstance(settings, dict):
            raise ModelError(f"{file} is not a JSON object")
        found: Any = cast("dict[str, Any]", settings).get("eos_token_id")
        if found is None:
            continue
        listed = cast("list[Any]", found) if isinstance(found, list) else [found]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
            raise ModelError(f"eos_token_id in {file} is {found!r}; it must be a token id, or a list of token ids")
        return sorted({each for each in listed if each in added})
    return []


_HELD = 24
"""Number of held-back tokens after which incomplete text is returned. No character consists of so many tokens."""

_LONGEST_CHARACTER = 4  # bytes of the longest character, and therefore its largest number of tokens

Decode = Callable[[Sequence[int]], str]
"""Function from tokens to their text."""


class Detokenizer:
    """Incremental decoder of streamed tokens. The returned pieces join to the text of all tokens.

    The text of a token depends on earlier tokens: the bytes of a character may be in several tokens, and some decoders
    put spaces between words. So a window of tokens is decoded with and without the last ones, and the difference is
    their text. A character with missing bytes is held back.

    Args:
        decode: Function from tokens to their text.
        before: Earlier tokens whose text is known already, such as a prompt that is continued.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(before)
        self._read = len(self._window)  # number of tokens of the window whose text was returned
        self._given = decode(self._window) if before else ""  # the text of these tokens

    def add(self, token_ids: Sequence[int]) -> str:
        """Append tokens and return the new text."""
        self._window.extend(token_ids)  # `+=` would make it an array
        size = len(self._window)
        for end in range(size, max(self._read, size - _LONGEST_CHARACTER), -1):
            text = self._decode(self._window[:end])
            if len(text) > len(self._given) and not text.endswith("\ufffd"):
                return self._give(text, end)
        if size - self._read >= _HELD and len(text := self._decode(self._window)) > len(self._given):
            return self._give(text, size)
        return ""

    def _give(self, text: str, end: int) -> str:
        """Return the text of the window up to `end` that was not returned yet."""
        piece = text[len(self._given) :]
        self._window, self._read = self._window[self._read :], end - self._read
        self._given = self._decode(self._window[: self._read])
        return piece

    def end(self) -> str:
        """Return the rest of the text, with any incomplete character."""
        return self._decode(self._window)[len(self._given) :]


_REMEMBERED = 1 << 16
_NO_CHARACTER = "\ufffd"  # stands for the bytes of an incomplete character


class TokenTexts:
    """Texts of single tokens, which join to the text of all tokens.

    A character whose bytes lie in several tokens belongs to the last of them; the others have no text.

    Example: with a tokenizer of bytes, `of([72, 195, 169])` is `["H", "", "é"]`.

    Args:
        decode: Function from tokens, including special ones, to their text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

        @lru_cache(_REMEMBERED)
        def of_one(token_id: int) -> str:
            return decode([token_id])

        self._of_one = of_one

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> TokenTexts:
        """Make it from a tokenizer of `transformers` or `tokenizers`, which no other thread may use."""
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        return cls(lambda token_ids: backend.decode(list(token_ids), skip_special_tokens=False))

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token.

        Raises:
            Exception: raised by the tokenizer for an unknown token.
        """
        texts = [self._of_one(token_id) for token_id in token_ids]
        start = 0
        for is_part, run in groupby(texts, lambda text: _NO_CHARACTER in text):
            length = len(list(run))
            if is_part:
                texts[start : start + length] = self._in_turn(token_ids[start : start + length])
            start += length
        return texts if "".join(texts) == self._decode(token_ids) else self._in_turn(token_ids)

    def _in_turn(self, token_ids: Sequence[int]) -> list[str]:
        """Texts of tokens that depend on earlier ones. Takes ten times as long."""
        detokenizer = Detokenizer(self._decode)
        texts = [detokenizer.add([token_id]) for token_id in token_ids]
        if texts:
            texts[-1] += detokenizer.end()
        return texts
