"""Checksums of tensors: they add up over slices, and every changed bit changes them."""

from __future__ import annotations

import math
from unittest import mock

import pytest

pytest.importorskip("torch", reason="needs the cpu or gpu extra")

import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.core import tensor_checksum
from titan_rl.core.tensor_checksum import box_checksum, covers, is_exact_in

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 40).to(dtype)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.data(),
)
def test_checksums_of_slices_add_up_for_any_partition(
    dtype: torch.dtype, shape: list[int], data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, 3))  # views may begin inside a word
    whole = (
        drawn((offset + math.prod(shape),), dtype)[offset:].view(shape).movedim(0, data.draw(st.sampled_from((0, -1))))
    )
    shape = list(whole.shape)
    boxes = [((0,) * len(shape), whole)]
    for _ in range(data.draw(st.integers(0, 4))):
        start, box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, box.shape[dim]))
        second = tuple(place + at if d == dim else place for d, place in enumerate(start))
        boxes += [(start, box.narrow(dim, 0, at)), (second, box.narrow(dim, at, box.shape[dim] - at))]

    assert sum(box_checksum(box, start) for start, box in boxes) % 2**64 == box_checksum(whole)
    assert covers([(start, box.shape) for start, box in boxes], shape)


def test_checksums_of_partial_rows_add_up() -> None:
    whole = drawn((2, 3), torch.bfloat16)
    boxes = [((row, at), whole[row : row + 1, at : at + size]) for row in (0, 1) for at, size in ((0, 2), (2, 1))]
    assert sum(box_checksum(box, start) for start, box in boxes) % 2**64 == box_checksum(whole)


@given(
    st.sampled_from([(1,), (3, 5), (2, 3, 64), (384, 128), (3, tensor_checksum.CHUNK_BYTES // 4 + 9)]),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_checksum_is_the_same_with_and_without_byte_products(
    shape: tuple[int, ...], seed: int, has_extremes: bool
) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    if has_extremes:  # bytes of -128
        bits.flatten()[::2] = -(2**31) + 0x808080
    words = bits.view(torch.int8).view(*shape, 4).to(torch.int64)
    expected = (words << torch.tensor([0, 8, 16, 24])).sum(-1)
    for dim in reversed(range(len(shape))):
        expected = (expected * tensor_checksum.factors(dim, 3, shape[dim], bits.device)).sum(-1)

    found = []
    for multiplies_bytes in (True, False):
        with mock.patch.object(tensor_checksum, "_multiplies_bytes", return_value=multiplies_bytes):
            found.append(box_checksum(bits, (3,) * len(shape)))
    assert found == [int(expected) % 2**64] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksum_detects_bit_flips_reversals_and_permutations(dtype: torch.dtype) -> None:
    whole = drawn((16, 24), dtype)
    bits = whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    expected = box_checksum(whole)
    for place in ((0, 0), (7, 11), (15, 23)):
        for bit in range(8 * dtype.itemsize - 1):
            bits[place] ^= 1 << bit
            assert box_checksum(whole) != expected
            bits[place] ^= 1 << bit
    assert box_checksum(whole) == expected
    assert box_checksum(whole.flip(0)) != expected
    assert box_checksum(whole.flip(1)) != expected
    assert box_checksum(whole[torch.randperm(16)]) != expected
    assert box_checksum(whole.t().contiguous().view(16, 24)) != expected
    assert box_checksum(-whole) != expected


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 23)), min_size=2, max_size=6, unique=True))
def test_checksum_detects_several_sign_changes(places: list[tuple[int, int]]) -> None:
    whole = drawn((16, 24), torch.float32).abs() + 1
    expected = box_checksum(whole)
    for place in places:
        whole[place] *= -1
    assert box_checksum(whole) != expected


def test_is_exact_in_a_dtype_that_contains_every_value() -> None:
    assert is_exact_in(torch.float32, torch.bfloat16)
    assert not is_exact_in(torch.bfloat16, torch.float32)
    assert not is_exact_in(torch.float16, torch.bfloat16)
    assert not is_exact_in(torch.bfloat16, torch.float16)


def test_checksums_of_many_rows_add_up() -> None:
    whole = drawn((300, 500), torch.bfloat16)
    assert sum(box_checksum(row[None], (index, 0)) for index, row in enumerate(whole)) % 2**64 == box_checksum(whole)
