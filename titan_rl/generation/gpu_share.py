"""How much of a GPU an engine takes, so that others fit beside it."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path

from titan_rl.calls.parsing import parse_json
from titan_rl.errors import ModelError

WORK_BYTES = 3 * 2**30
"""For the context of CUDA, captured graphs, and what is computed in a step. An estimate: a model with a large
vocabulary and many running requests may need more, which `generation.gpu_share` says."""

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def gpu_share_of(total_bytes: int, *, weight_bytes: int, kv_bytes: int, work_bytes: int = WORK_BYTES) -> float:
    """The part of a GPU's memory that weights, KV cache and work space come to.

    Example: 16 GB of weights and 20 GB of KV cache are 0.28 of 141 GB.

    Raises:
        ModelError: they are more than the GPU has.
    """
    need = weight_bytes + kv_bytes + work_bytes
    if need > total_bytes:
        gib = 2**30
        left = max(0.0, (total_bytes - weight_bytes - work_bytes) / gib)
        raise ModelError(
            f"weights of {weight_bytes / gib:.1f} GiB, a KV cache of {kv_bytes / gib:.1f} GiB and "
            f"{work_bytes / gib:.1f} GiB to work in do not fit a GPU of {total_bytes / gib:.1f} GiB; lower "
            f"generation.kv_cache_gib to at most {left:.1f}, or raise generation.tensor_parallel_size"
        )
    return need / total_bytes


def weight_bytes(folder: Path, dtype: str) -> int:
    """Of a Hugging Face folder's weights in a dtype, from the headers of its files."""
    return _ITEMSIZE[dtype] * sum(map(_numel, sorted(folder.glob("*.safetensors"))))


def _numel(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = parse_json(file.read(length))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
