"""A rank's tensors on disk: a safetensors file, which says of each slice where it lies in its tensor.

Reading one executes nothing, and reads no more than the slices that are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import DamagedCheckpointError
from titan_rl.training.state.checkpoint import FileChecksum, SummingWriter
from titan_rl.weights.types import SlicePosition, TensorSlice

SUFFIX = ".safetensors"


def _nothing(num_bytes: int) -> None: ...


_PLACES = "places"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_slices(path: Path, slices: Mapping[str, TensorSlice], took: Callable[[int], None] = _nothing) -> FileChecksum:
    """Write slices of tensors for `TensorFiles` to read. See `write_tensors`."""
    places = {name: [each.position.start, each.position.whole_shape] for name, each in slices.items()}
    tensors = {name: each.tensor for name, each in slices.items()}
    return write_tensors(path, tensors, tensors.items(), {_PLACES: json.dumps(places)}, took)


def write_tensors(
    path: Path,
    layout: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
    took: Callable[[int], None] = _nothing,
) -> FileChecksum:
    """Write a safetensors file of tensors on any device, one after the other: no copy is made but of one at a time.

    Args:
        layout: their dtypes and shapes, for which tensors without memory do.
        tensors: in that order.
        took: told of the bytes that the disk has taken.

    Raises:
        OSError: the disk is full, or cannot be written.
        TypeError: a tensor has a dtype that the format does not know.
        ValueError: the tensors are not those of the layout.
    """
    header: dict[str, Any] = {}
    position = 0
    for name, tensor in layout.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is {tensor.dtype}, which a checkpoint cannot hold")
        end = position + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [position, end]}
        position = end
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        writer = SummingWriter(file, took)
        writer.write(memoryview(len(text).to_bytes(8, "little") + text))
        for (name, tensor), (expected, place) in zip(tensors, layout.items(), strict=True):
            if (name, tensor.dtype, tensor.shape) != (expected, place.dtype, place.shape):
                raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)} is written in the place of {expected}")
            if tensor.numel():
                data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                writer.write(memoryview(data))
        return writer.close()


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice that a file has."""

    path: Path
    shape: tuple[int, ...]
    position: SlicePosition


class TensorFiles:
    """The tensors of several files together, as if each were in one piece.

    Raises:
        DamagedCheckpointError: one is not a file of `write_slices`.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._slices: dict[str, list[StoredSlice]] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    places = parse_json(file.metadata()[_PLACES])
                    for name, (start, whole_shape) in places.items():
                        position = SlicePosition(tuple(start), tuple(whole_shape))
                        stored = StoredSlice(path, tuple(file.get_slice(name).get_shape()), position)
                        self._slices.setdefault(name, []).append(stored)
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                raise DamagedCheckpointError(f"{path} is damaged: {error!r}") from error

    @property
    def names(self) -> set[str]:
        return set(self._slices)

    def has_dtype(self, prefix: str, dtype: str) -> bool:
        """Whether a tensor whose name begins so has a dtype, by the name that the files give it."""
        name = next((name for name in self._slices if name.startswith(prefix)), None)
        if name is None:
            return False
        with safe_open(self._slices[name][0].path, framework="pt") as file:
            return file.get_slice(name).get_dtype() == dtype

    def read(self, wanted: Mapping[str, TensorSlice]) -> None:
        """Fill slices in place, however the tensors are cut here and there.

        Raises:
            ValueError: a tensor has another shape or dtype than is wanted, or is not there in full.
        """
        by_path: dict[Path, list[tuple[str, StoredSlice]]] = {}
        for name, target in wanted.items():
            covered = 0
            for stored in self._slices.get(name, []):
                if stored.position.whole_shape != target.position.whole_shape:
                    raise ValueError(
                        f"{name} has shape {stored.position.whole_shape}; this trainer's has "
                        f"{target.position.whole_shape}"
                    )
                if size := _common(stored, target)[2]:
                    covered += size
                    by_path.setdefault(stored.path, []).append((name, stored))
            if covered != target.tensor.numel():
                raise ValueError(f"{covered} of the {target.tensor.numel()} elements of {name} are there")
        for path, parts in by_path.items():
            with safe_open(path, framework="pt") as file:
                for name, stored in parts:
                    target = wanted[name]
                    there, here, _ = _common(stored, target)
                    piece = file.get_slice(name)[there] if there else file.get_tensor(name)
                    if piece.dtype != target.tensor.dtype:
                        raise ValueError(f"{name} is {piece.dtype}; this trainer's is {target.tensor.dtype}")
                    target.tensor[here].copy_(piece)


def _common(stored: StoredSlice, target: TensorSlice) -> tuple[tuple[slice, ...], tuple[slice, ...], int]:
    """Overlap of two slices of a tensor: its box in the one, its box in the other, and its number of elements."""
    there: list[slice] = []
    here: list[slice] = []
    count = 1
    for start, size, wanted_start, wanted_size in zip(
        stored.position.start, stored.shape, target.position.start, target.tensor.shape, strict=True
    ):
        first, end = max(start, wanted_start), min(start + size, wanted_start + wanted_size)
        there.append(slice(first - start, end - start))
        here.append(slice(first - wanted_start, end - wanted_start))
        count *= max(0, end - first)
    return tuple(there), tuple(here), count
