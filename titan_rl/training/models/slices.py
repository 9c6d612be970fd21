"""Which slices of its Hugging Face tensors each rank publishes.

A parameter that torchtitan and Hugging Face only name differently, or keep in one tensor here and in one for each of
its rows there (experts), is published by the ranks that hold it, without talking to one another. What an adapter
computes (Llama's queries and keys) is gathered, and the ranks take turns in publishing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from titan_rl.training.parallel.parallel import full_tensor, owned_slice
from titan_rl.training.parallel.world import World
from titan_rl.weights.types import SlicePosition, TensorSlice


@dataclass(frozen=True, slots=True)
class HFNames:
    """The Hugging Face tensors that are a parameter, or views of it.

    Example: `HFNames(("model.norm.weight",))`, or with `are_rows` the names of a layer's experts.
    """

    names: tuple[str, ...]  # none of a parameter that is another's, as a tied head is
    are_rows: bool = False


def hf_names(adapter: Any, state_dict: Mapping[str, torch.Tensor]) -> dict[str, HFNames | None]:
    """By parameter; None where the adapter computes the Hugging Face tensors."""
    return {name: _hf_names(adapter, name, tensor.shape) for name, tensor in state_dict.items()}


def held_slices(
    state_dict: Mapping[str, torch.Tensor],
    names: Mapping[str, HFNames | None],
    adapter: Any,
    world: World,
    dtype: torch.dtype,
) -> list[tuple[str, TensorSlice]]:
    """(Hugging Face name, slice) pairs of this rank. All ranks call this at the same time.

    Together the ranks have every element once. The first one names every tensor, also those that others have whole, so
    that a version that lacks a part is found out.

    Args:
        names: from `hf_names`.
        dtype: of what is gathered, which has memory of its own. Everything else shares the parameters' memory.
    """
    turns = count()
    found: list[tuple[str, TensorSlice]] = []
    for parameter, tensor in state_dict.items():
        if (direct := names[parameter]) is None:
            for name, made in adapter.to_hf({parameter: full_tensor(tensor)}).items():
                mine = next(turns) % world.size == world.rank
                piece = _cut(_own(made, dtype)) if mine else None
                found += _entries(name, piece, made.shape, dtype, world)
        else:
            piece = owned_slice(tensor, world)
            shape = tensor.shape[1:] if direct.are_rows else tensor.shape
            for row, name in enumerate(direct.names):
                own = _row(piece, row) if direct.are_rows else piece
                found += _entries(name, own, shape, dtype, world)
    return found


def _hf_names(adapter: Any, parameter: str, shape: torch.Size) -> HFNames | None:
    tensor = torch.empty(shape, device="meta")
    made: dict[str, torch.Tensor] = adapter.to_hf({parameter: tensor})
    if all(value is tensor for value in made.values()):
        return HFNames(tuple(made))
    rows = list(tensor.unbind()) if len(shape) else []
    if len(made) == len(rows) and all(map(_same_view, made.values(), rows)):
        return HFNames(tuple(made), are_rows=True)
    return None


def _same_view(tensor: torch.Tensor, row: torch.Tensor) -> bool:
    def layout(each: torch.Tensor) -> tuple[Any, ...]:
        return each.shape, each.stride(), each.storage_offset()

    return layout(tensor) == layout(row)


def _row(piece: TensorSlice | None, row: int) -> TensorSlice | None:
    if piece is None:
        return None
    first, *start = piece.position.start
    if not first <= row < first + len(piece.tensor):
        return None
    return TensorSlice(piece.tensor[row - first], SlicePosition(tuple(start), piece.position.whole_shape[1:]))


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In memory of its own: a view would keep all of the gathered parameter."""
    converted = tensor.to(dtype)
    return converted.clone() if converted.untyped_storage().nbytes() > converted.nbytes else converted


def _cut(tensor: torch.Tensor) -> TensorSlice:
    shape = tuple(tensor.shape)
    return TensorSlice(tensor, SlicePosition((0,) * len(shape), shape))


def _entries(
    name: str, piece: TensorSlice | None, shape: torch.Size, dtype: torch.dtype, world: World
) -> Iterator[tuple[str, TensorSlice]]:
    if piece is not None:
        yield name, piece
    elif world.is_first:
        empty = torch.empty((0, *shape[1:]), dtype=dtype)
        yield name, TensorSlice(empty, SlicePosition((0,) * len(shape), tuple(shape)))
