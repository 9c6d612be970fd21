"""Checksums of tensors that add up over slices. torch is imported when one is computed.

A tensor that is cut into boxes, in whatever way, has the sum of its boxes' checksums: those that trainer ranks publish
and those that engine ranks hold need not be cut alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MASK = (1 << 64) - 1
CHUNK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 24}  # at a time: what fits a cache, or is little beside the weights


@dataclass(frozen=True, slots=True)
class TensorChecksum:
    """A whole tensor's checksum, with what else two tensors have to share to be equal."""

    dtype: str  # torch's name without the prefix: "bfloat16"
    shape: tuple[int, ...]
    value: int  # 64 bits


def box_checksum(box: torch.Tensor, start: Sequence[int] = ()) -> int:
    """Checksum of a box of a tensor: its bits in words of 32, each times a factor of its place, modulo 2**64.

    A word's factor is the product of one 64-bit number for its place along each dimension. Whatever changes in a single
    word is found, and so is an element that moves. Of other changes, including whole versions, layers or ranks that
    take each other's place, about one in 2**32 would not be found, if the numbers were drawn for it.

    Args:
        box: on any device, of any dtype.
        start: its first element's place in the whole tensor; by default it is the whole, or begins where that does.

    Example: `box_checksum(whole) == (box_checksum(whole[:2]) + box_checksum(whole[2:], (2, 0))) % 2**64`
    """
    return checksums_of([box_sum(box, start)])[0]


def box_sum(box: torch.Tensor, start: Sequence[int] = ()) -> torch.Tensor:
    """`box_checksum` on the box's device, where the device is not to be waited for.  # [], int64"""
    import torch

    if not box.numel():
        return torch.zeros((), dtype=torch.int64, device=box.device)
    box = box.detach()
    if box.ndim == 0:
        box, start = box.view(1), (0,)
    start = start or (0,) * box.ndim
    words, first = _words(box, start[-1])
    sums = dot(words, factors(box.ndim - 1, first, words.shape[-1], box.device))
    for dim in reversed(range(box.ndim - 1)):
        sums = dot(sums, factors(dim, start[dim], box.shape[dim], box.device))
    return sums


def checksums_of(sums: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of several `box_sum`s, with one wait for each device."""
    import torch

    found = [0] * len(sums)
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        for place, value in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            found[place] = value & MASK
    return found


def _words(box: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    """The last dimension in words of 32 bits, and the place of the first one. A word that the box has in part is filled
    with zeros, so that its parts add up to it."""
    import torch

    size = box.element_size()
    if size >= 4:
        return box.contiguous().view(torch.int32), start * size // 4
    per_word = 4 // size
    before = start % per_word
    after = -(before + box.shape[-1]) % per_word
    if before or after:
        padded = box.new_zeros((*box.shape[:-1], before + box.shape[-1] + after))
        padded.narrow(-1, before, box.shape[-1]).copy_(box)
        box = padded
    return box.contiguous().view(torch.int32), start // per_word


def dot(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The rows' dot products with factors, modulo 2**64.  # [..., N], [N] -> [...]"""
    import torch

    if rows.device.type == "cpu" and rows.numel() <= CHUNK_WORDS["cpu"]:
        wide = rows if rows.dtype == torch.int64 else rows.to(torch.int64)
        return torch.matmul(wide, by)
    flat = rows.reshape(-1, rows.shape[-1])
    found = torch.empty(len(flat), dtype=torch.int64, device=rows.device)
    at_a_time = max(1, CHUNK_WORDS.get(rows.device.type, CHUNK_WORDS["cuda"]) // max(1, len(by)))
    for at in range(0, len(flat), at_a_time):
        part = flat[at : at + at_a_time].to(torch.int64)
        if rows.device.type == "cpu":
            torch.mv(part, by, out=found[at : at + at_a_time])
        else:  # it multiplies no matrices of integers
            torch.sum(part * by, -1, out=found[at : at + at_a_time])
    return found.view(rows.shape[:-1])


@lru_cache(256)
def factors(dim: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers of 64 bits, one for each place along a dimension; along the last one for each word.  # [count]"""
    import torch

    places = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    mixed = places * _signed(0x9E3779B97F4A7C15) + _signed((dim + 1) * 0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    return (values >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def is_exact_in(held: torch.dtype, published: torch.dtype) -> bool:
    """A value of the published dtype is kept by the held one, and converts back to the same bits."""
    import torch

    if held == published:
        return True
    if not (held.is_floating_point and published.is_floating_point):
        return False
    narrow, wide = torch.finfo(published), torch.finfo(held)
    return wide.max >= narrow.max and wide.eps <= narrow.eps and wide.smallest_normal <= narrow.smallest_normal


def covers(boxes: Sequence[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Boxes that do not overlap make up a tensor of this shape.

    Args:
        boxes: (start, shape) of each.
    """
    inside = all(
        at >= 0 and at + size <= whole
        for start, sizes in boxes
        for at, size, whole in zip(start, sizes, shape, strict=True)
    )
    return inside and sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape)
