"""Checks of a model's weights for NaN and infinite values, which a run that diverged leaves behind, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from titan_rl.core.errors import ModelError
from titan_rl.core.model_identity import read_header

MOST_BYTES = 32 * 2**30
"""Bytes that `check_finite_folder` reads, in half a minute from a fast disk. The trainer checks what it loads."""

BLOCK = 1 << 22

_EXPONENTS = {
    "F64": np.array(0x7FF0000000000000, np.uint64),
    "F32": np.array(0x7F800000, np.uint32),
    "BF16": np.array(0x7F80, np.uint16),
    "F16": np.array(0x7C00, np.uint16),
}
"""Bits of the exponent by dtype. All are set in NaN and infinite values, and in no others."""


def require_finite(tensor: Any, name: str, file: Path) -> None:
    """Check a torch tensor that was read from a file.

    Raises:
        ModelError: It has NaN or infinite values.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return
    if tensor.dtype.itemsize == 1:  # no minimum of float8 is implemented
        tensor = tensor.float()
    # The extremes are NaN if any value is, and unlike `isfinite` they take no memory.
    if not all(extreme.isfinite() for extreme in tensor.aminmax()):
        raise _not_finite(name, file)


def check_finite_folder(folder: Path) -> None:
    """Check the weights of a folder, at most `MOST_BYTES` of them.

    Raises:
        ModelError: A tensor has NaN or infinite values, or a file cannot be read.
    """
    left = MOST_BYTES
    for file in sorted(folder.glob("*.safetensors")):
        dtypes, data = _dtypes(file), np.memmap(file, mode="r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, (_, end) in sorted(read_header(file).items(), key=lambda entry: entry[1][1]):
            left -= end - start
            if left < 0:
                return
            if (exponent := _EXPONENTS.get(dtypes[name])) is not None:
                for first in range(start, end, BLOCK):
                    numbers = data[first : min(first + BLOCK, end)].view(exponent.dtype)
                    if ((numbers & exponent) == exponent).any():
                        raise _not_finite(name, file)
            start = end


def _dtypes(file: Path) -> dict[str, str]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            return {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118  no mapping
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _not_finite(name: str, file: Path) -> ModelError:
    return ModelError(
        f"{file} has NaN or infinite values in {name!r}; fetch the file again, or use the model of an earlier step"
    )
