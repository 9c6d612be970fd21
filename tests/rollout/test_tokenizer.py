"""Tokenizer of a model's folder, which caches short texts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers

from titan_rl.rollout.renderer.tokenizer import load_transformers_tokenizer

BASE = Path(__file__).parents[2] / "examples" / "alphabet_sort" / "base"


@pytest.mark.parametrize("text", ["", "\n", "<|im_start|>assistant\n", "Sort these names alphabetically. " * 4])
def test_cached_encoding_cannot_be_modified(text: str):
    tokenizer = load_transformers_tokenizer(BASE)
    plain = transformers.TokenizersBackend.from_pretrained(BASE, local_files_only=True)
    for special in (True, False):
        expected = plain.encode(text, add_special_tokens=special)
        for _ in range(2):
            found = tokenizer.encode(text, add_special_tokens=special)
            assert found == expected
            found.append(0)
    assert tokenizer.encode(text, truncation=True, max_length=1) == plain.encode(text, truncation=True, max_length=1)
