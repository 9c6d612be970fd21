"""Incremental detokenization, which gives the same text as decoding all tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from byte_model import byte_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st

from titan_rl.rollout.renderer.tokenizer import Detokenizer
from titan_rl.serving.text import Text, TextReader

WORDS = ["[UNK]", "un", "##happi", "##ness", "the", ",", "cat", "##s"]


def metaspace() -> Any:
    vocab = {token: i for i, token in enumerate(["▁", "▁a", "▁b", "c", "d", "▁▁", "<0xE2>", "<0x82>", "<0xAC>"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def wordpiece() -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    return backend


BYTES = Text(byte_tokenizer())
CASES = [(BYTES, 256 + 9), (Text(metaspace()), 6), (Text(wordpiece()), len(WORDS))]


def detokenized(decode: Callable[[Sequence[int]], str], chunks: list[list[int]], before: Sequence[int] = ()) -> str:
    detokenizer = Detokenizer(decode, before)
    return "".join([*(detokenizer.add(chunk) for chunk in chunks), detokenizer.end()])


@pytest.mark.parametrize(("text", "size"), CASES, ids=["bytes", "metaspace", "wordpiece"])
@given(data=st.data())
def test_joined_chunks_equal_the_text(text: Text, size: int, data: st.DataObject) -> None:
    chunks = data.draw(st.lists(st.lists(st.integers(0, size - 1), max_size=4), max_size=5))
    token_ids = [token_id for chunk in chunks for token_id in chunk]
    assert detokenized(text.decode, chunks) == text.decode(token_ids)


@example("\x80\x80𐀀𐀀𐀀\x80𐀀𐀀", 5)  # each chunk ends within a character
@given(st.text(max_size=20), st.integers(1, 5))
def test_chunks_do_not_split_characters(said: str, size: int) -> None:
    said = said.replace("\ufffd", "")
    token_ids = BYTES.encode(said)
    detokenizer = Detokenizer(BYTES.decode)
    pieces = [detokenizer.add(token_ids[at : at + size]) for at in range(0, len(token_ids), size)]
    assert "".join(pieces) == said


def test_byte_fallback_character_is_emitted_whole() -> None:
    text = Text(metaspace())
    detokenizer = Detokenizer(text.decode)
    assert [detokenizer.add([token_id]) for token_id in (1, 6, 7, 8, 2)] == ["a", "", "", "€", " b"]


def test_continuation_keeps_its_leading_space() -> None:
    text = Text(metaspace())
    assert detokenized(text.decode, [[2]]) == "b"
    assert detokenized(text.decode, [[2]], before=[1]) == " b"


def test_invalid_bytes_are_not_held_back_indefinitely() -> None:
    detokenizer = Detokenizer(BYTES.decode)
    begun = BYTES.encode("€")[:1]
    told_after = [bool(detokenizer.add(begun)) for _ in range(100)]
    assert any(told_after[:30])


@pytest.mark.parametrize(
    ("said", "stops", "text"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "one t"), ""),
        ("abab", ("abb",), "abab"),
        ("ababb", ("abb",), "ab"),
        ("aab€c", ("€",), "aab"),
        ("end", ("ending", "dx"), "end"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_text_ends_before_the_first_stop_string(said: str, stops: tuple[str, ...], text: str, size: int) -> None:
    token_ids = BYTES.encode(said)
    reader, pieces, num_tokens = TextReader(BYTES.decode, stops), list[str](), 0
    for at in range(0, len(token_ids), size):
        piece, count = reader.add(token_ids[at : at + size])
        pieces.append(piece)
        num_tokens += count
        if reader.stop is not None:
            break
    pieces.append(reader.end())
    assert "".join(pieces) == text
    assert (reader.stop is not None) == any(stop in said for stop in stops)
    kept = BYTES.decode(token_ids[:num_tokens])
    assert kept == said if reader.stop is None else any(kept.endswith(stop) for stop in stops)
