"""Checks of a model's weights for NaN and infinite values, which a run that diverged leaves behind."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from titan_rl.core.errors import ModelError

MOST_BYTES = 32 * 2**30
"""Bytes that `check_finite_folder` reads, in half a minute from a fast disk. The trainer checks what it loads."""


def require_finite(tensor: torch.Tensor, name: str, file: Path) -> None:
    """Check a tensor that was read from a file.

    Raises:
        ModelError: It has NaN or infinite values.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return
    if tensor.dtype.itemsize == 1:  # no minimum of float8 is implemented
        tensor = tensor.float()
    # The extremes are NaN if any value is, and unlike `isfinite` they take no memory.
    if not all(extreme.isfinite() for extreme in tensor.aminmax()):
        raise ModelError(
            f"{file} has NaN or infinite values in {name!r}; fetch the file again, or use the model of an earlier step"
        )


def check_finite_folder(folder: Path) -> None:
    """Check the weights of a folder, at most `MOST_BYTES` of them.

    Raises:
        ModelError: A tensor has NaN or infinite values, or a file cannot be read.
    """
    left = MOST_BYTES
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  a safe_open is not a mapping
                    tensor = tensors.get_tensor(name)
                    left -= tensor.nbytes
                    if left < 0:
                        return
                    require_finite(tensor, name, file)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
