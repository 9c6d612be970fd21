"""Checksums of tensors that add up over slices. torch is imported when a checksum is computed.

The checksum of a tensor is the sum of the checksums of its boxes, for any division into boxes. The slices that trainer
ranks publish may therefore differ from those that engine ranks hold.
"""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MASK = (1 << 64) - 1
CHUNK_WORDS = {"cpu": 1 << 16, "cuda": 1 << 24}  # words per chunk: fits a cache, or is small compared with the weights
CHUNK_BYTES = 1 << 16  # bytes of a row per chunk: their products sum to less than 2**31
LOW_SIGNS = 0x00808080  # sign bits of a word's lower bytes


@dataclass(frozen=True, slots=True)
class TensorChecksum:
    """Checksum of a whole tensor, with its dtype and shape, which equal tensors share, too."""

    dtype: str  # torch's name without the prefix: "bfloat16"
    shape: tuple[int, ...]
    value: int  # 64 bits


def box_checksum(box: torch.Tensor, start: Sequence[int] = ()) -> int:
    """Checksum of a box of a tensor: the sum of its 32-bit words, each times a factor of its position, modulo 2**64.

    The value of a word is the sum of its signed bytes times 2**0, 2**8, 2**16 and 2**24, because processors multiply
    signed bytes several times as fast as 64-bit numbers. The factor of a word is the product of one 64-bit number for
    its position along each dimension. Every change within a single word is detected, and so is an element that moves.
    About one in 2**32 of all other changes would go undetected if the factors were random, including swapped versions,
    layers or ranks.

    Args:
        box: Tensor on any device, of any dtype.
        start: Position of the box's first element in the whole tensor; by default the origin.

    Example: `box_checksum(whole) == (box_checksum(whole[:2]) + box_checksum(whole[2:], (2, 0))) % 2**64`
    """
    return checksums_of([box_sum(box, start)])[0]


def box_sum(box: torch.Tensor, start: Sequence[int] = ()) -> torch.Tensor:
    """`box_checksum` as a tensor on the box's device, without waiting for the device.  # [], int64"""
    import torch

    if not box.numel():
        return torch.zeros((), dtype=torch.int64, device=box.device)
    box = box.detach()
    if box.ndim == 0:
        box, start = box.view(1), (0,)
    start = start or (0,) * box.ndim
    sums = row_sums(box, start[-1])
    for dim in reversed(range(box.ndim - 1)):
        sums = weighted_sum(sums, factors(dim, start[dim], box.shape[dim], box.device))
    return sums


def row_sums(box: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Sums along the last dimension of a box, still without the factors of the other dimensions.

    Args:
        box: [..., N]
        start: Position of the box's first element along the last dimension.

    Returns:
        [...], int64
    """
    words, first = _words(box, start)
    factor_range = box.ndim - 1, first, words.shape[-1]
    if words.device.type == "cpu" and _multiplies_bytes():
        return _byte_dot(words, _byte_factors(*factor_range))
    return word_dot(words, factors(*factor_range, words.device))


def weighted_sum(sums: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Sums of 64-bit numbers times factors, modulo 2**64.  # [..., N], [N] -> [...]"""
    import torch

    if sums.device.type == "cpu":
        return torch.matmul(sums, by)
    return (sums * by).sum(-1)  # GPUs do not multiply integer matrices


def checksums_of(sums: Sequence[torch.Tensor]) -> list[int]:
    """Convert several `box_sum`s to checksums, with one wait for each device."""
    import torch

    found = [0] * len(sums)
    for device in {each.device for each in sums}:
        indices = [index for index, each in enumerate(sums) if each.device == device]
        for index, value in zip(indices, torch.stack([sums[index] for index in indices]).tolist(), strict=True):
            found[index] = value & MASK
    return found


def _words(box: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    """The last dimension as 32-bit words, and the position of the first word. A word that the box contains only in part
    is filled with zeros, so that the parts in several boxes add up to the whole word."""
    import torch

    size = box.element_size()
    per_word = max(1, 4 // size)
    before = start % per_word
    after = -(before + box.shape[-1]) % per_word
    if before or after:
        padded = box.new_zeros((*box.shape[:-1], before + box.shape[-1] + after))
        padded.narrow(-1, before, box.shape[-1]).copy_(box)
        box = padded
    box = box.contiguous()
    flat = box.as_strided((box.numel(),), (1,))  # a dimension of size 1 may have any stride, and view keeps it
    if flat.storage_offset() % per_word:
        flat = flat.clone()
    return flat.view(torch.int32).view(*box.shape[:-1], -1), start * max(size, 4) // 4 // per_word


def word_dot(words: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Dot products of rows of words with factors, modulo 2**64.  # [..., N], [N] -> [...]"""
    import torch

    flat = words.reshape(-1, words.shape[-1])
    found = torch.empty(len(flat), dtype=torch.int64, device=words.device)
    at_a_time = max(1, CHUNK_WORDS.get(words.device.type, CHUNK_WORDS["cuda"]) // max(1, len(by)))
    for at in range(0, len(flat), at_a_time):
        # An unsigned byte with its high bit flipped is its signed value plus 128.
        part = (flat[at : at + at_a_time] ^ LOW_SIGNS).to(torch.int64)
        if words.device.type == "cpu":
            torch.mv(part, by, out=found[at : at + at_a_time])
        else:
            torch.sum(part.mul_(by), -1, out=found[at : at + at_a_time])
    return (found - by.sum() * LOW_SIGNS).view(words.shape[:-1])


def _byte_dot(words: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """`word_dot` for a CPU that multiplies matrices of signed bytes.  # [..., N], [8, 4 * N] -> [...]"""
    import torch

    rows = words.view(torch.int8).reshape(-1, 4 * words.shape[-1])
    products = [
        torch._int_mm(by[:, at : at + CHUNK_BYTES], rows[:, at : at + CHUNK_BYTES].t()).to(torch.int64)
        for at in range(0, rows.shape[1], CHUNK_BYTES)
    ]
    digits = products[0] if len(products) == 1 else torch.stack(products).sum(0)
    return (digits << _shifts()).sum(0).view(words.shape[:-1])


@lru_cache(1)
def _multiplies_bytes() -> bool:
    """Whether products of signed bytes are faster here than those of 64-bit numbers, by a trial of both. Without vector
    instructions for them, torch multiplies bytes one by one, which takes ten times as long."""
    import torch

    words = torch.ones((64, 1024), dtype=torch.int32)
    numbers, digits = factors(1, 0, 1024, words.device), _byte_factors(1, 0, 1024)
    timed = partial(timeit.repeat, timer=time.thread_time, repeat=3, number=1)
    return min(timed(lambda: _byte_dot(words, digits))) < min(timed(lambda: word_dot(words, numbers)))


@lru_cache(1)
def _shifts() -> torch.Tensor:
    import torch

    return torch.arange(0, 64, 8)[:, None]


@lru_cache(256)
def _byte_factors(dim: int, start: int, count: int) -> torch.Tensor:
    """Signed bytes of `factors`, arranged so that their products with the signed bytes of words are the base-256 digits
    of the product: byte i of a word contributes to digit i and to all higher ones.  # [8, 4 * count], int8"""
    import torch

    shifted = factors(dim, start, count, torch.device("cpu")) + _signed(0x8080808080808080)
    digits = ((shifted >> _shifts()) & 0xFF) - 128  # [8, count]
    found = torch.zeros((8, count, 4), dtype=torch.int8)
    for byte in range(4):
        found[byte:, :, byte] = digits[: 8 - byte]
    return found.view(8, 4 * count)


@lru_cache(256)
def factors(dim: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit numbers, one for each position along a dimension, or for each word along the last.  # [count]"""
    import torch

    positions = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    mixed = positions * _signed(0x9E3779B97F4A7C15) + _signed((dim + 1) * 0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    return (values >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def is_exact_in(held: torch.dtype, published: torch.dtype) -> bool:
    """Whether every value of the published dtype survives a conversion to the held dtype and back bit for bit."""
    import torch

    if held == published:
        return True
    if not (held.is_floating_point and published.is_floating_point):
        return False
    narrow, wide = torch.finfo(published), torch.finfo(held)
    return wide.max >= narrow.max and wide.eps <= narrow.eps and wide.smallest_normal <= narrow.smallest_normal


def covers(boxes: Sequence[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Whether boxes that do not overlap make up a whole tensor of this shape.

    Args:
        boxes: (start, shape) of each box.
        shape: Shape of the tensor.
    """
    inside = all(
        at >= 0 and at + size <= length
        for start, sizes in boxes
        for at, size, length in zip(start, sizes, shape, strict=True)
    )
    return inside and sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape)
