"""Deltas, which restore the new bytes from the old ones exactly or are found to be damaged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.core.errors import StateDictError
from titan_rl.weights.relay.delta import apply_delta, encode_delta

seeds = st.integers(0, 2**32 - 1)
shares = st.sampled_from([0.0, 1e-5, 0.01, 0.3, 1.0])


def changed(seed: int, words: int, share: float, word: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes before and after a share of their words changed, by small and large amounts."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, 4 * words, np.uint8)
    new = old.copy()
    numbers = new.view(f"<u{word}")
    at = rng.random(len(numbers)) < share
    numbers[at] += rng.choice([1, 2, 255, 2 ** (8 * word) - 1, 2 ** (8 * word - 1)], at.sum()).astype(numbers.dtype)
    return old, new


@given(seeds, st.sampled_from([0, 1, 16, 70_000]), shares, st.sampled_from([2, 4]))
def test_delta_restores_the_new_bytes(seed: int, words: int, share: float, word: int) -> None:
    old, new = changed(seed, words, share, word)
    encoded = encode_delta(old, new, word)
    if encoded is None:
        assert share > 0
        return
    assert len(encoded) < max(len(new), 8)
    apply_delta(encoded, old)
    assert np.array_equal(old, new)


def test_complete_change_has_no_delta() -> None:
    assert encode_delta(*changed(1, 1000, 1.0, 2), 2) is None


def test_bfloat16_step_has_a_small_delta() -> None:
    weights = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    step = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).sign() * 3e-6
    old, new = (t.bfloat16().view(torch.uint8).numpy() for t in (weights, weights + step))
    encoded = encode_delta(old, new, 2)
    assert encoded is not None
    assert len(encoded) < 0.08 * len(new)


@given(seeds, st.sampled_from([2, 4]), st.data())
def test_damaged_delta_that_fails_changes_no_bytes(seed: int, word: int, data: st.DataObject) -> None:
    old, new = changed(seed, 200, 0.1, word)
    encoded = encode_delta(old, new, word)
    assert encoded is not None
    damaged = bytearray(encoded)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    before = old.copy()
    try:
        apply_delta(bytes(damaged), old)
    except StateDictError:
        assert np.array_equal(old, before)


@pytest.mark.parametrize("damaged", [b"", b"\x02", bytes([2, 1, 9, 0, 0, 0]), bytes([3, 1, 1, 0, 0, 0]) + b"x" * 20])
def test_rejects_invalid_deltas(damaged: bytes) -> None:
    with pytest.raises(StateDictError, match="damaged"):
        apply_delta(damaged, np.zeros(64, np.uint8))
