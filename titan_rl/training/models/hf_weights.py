"""The tensors of a Hugging Face folder, of which each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from titan_rl.core.errors import ModelError
from titan_rl.weights.types import SlicePosition


class HFWeights:
    """Names and shapes are compared when it is made, and nothing is read before.

    Args:
        expected: what config.json describes, shapes by name.
        is_ignored: whether a tensor of this name may be there all the same.

    Raises:
        ModelError: the folder has no weights, or other ones.
    """

    def __init__(
        self, folder: Path, expected: Mapping[str, tuple[int, ...]], is_ignored: Callable[[str], bool]
    ) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder} has no *.safetensors")
        self._files: dict[str, Path] = {}
        for file in files:
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118  a safe_open is not a mapping
                    if is_ignored(name):
                        continue
                    if name not in expected:
                        raise ModelError(f"{file} has {name!r}, which config.json does not describe")
                    shape = tuple(tensors.get_slice(name).get_shape())
                    if shape != expected[name]:
                        raise ModelError(
                            f"{name!r} in {file} has shape {shape}; config.json describes {expected[name]}"
                        )
                    self._files[name] = file
        if missing := sorted(expected.keys() - self._files.keys()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"the weights in {folder} lack {missing[0]!r}{more}, which config.json describes")

    def copy_into(self, target: torch.Tensor, name: str, position: SlicePosition | None = None) -> None:
        """Fill a tensor, on any device and of any dtype, with one of that name, or with the slice at a position.

        The file is mapped no longer than that: what was read of it would count as this process's memory.

        Raises:
            ModelError: the file cannot be read.
        """
        start = position.start if position else (0,) * target.dim()
        box = tuple(slice(first, first + size) for first, size in zip(start, target.shape, strict=True))
        with _opened(self._files[name]) as tensors:
            target.copy_(tensors.get_slice(name)[box])

    def read(self, name: str) -> torch.Tensor:
        """All of a tensor.

        Raises:
            ModelError: the file cannot be read.
        """
        with _opened(self._files[name]) as tensors:
            return tensors.get_tensor(name).clone()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
