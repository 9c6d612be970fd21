"""Share of a GPU's memory that an engine takes, so that others fit on the same GPU."""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ModelError

WORK_BYTES = 3 * 2**30
"""For the context of CUDA, captured graphs, and what is computed in a step. An estimate: a model with a large
vocabulary and many running requests may need more, which `generation.gpu_share` says."""

CPU_KV_GIB = 1.0
"""KV cache of an engine on a CPU, or on a trainer's GPU, whose setting does not say."""

GPU_SHARE = 0.9
"""Of a GPU's memory, what its engines fill by default."""

_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")  # of NVIDIA, its Tegra, AMD, and within WSL

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


def kv_bytes_of(total_bytes: int, free_bytes: int, *, weight_bytes: int, share: float | None, neighbours: int) -> int:
    """The KV cache that fills an engine's part of a GPU.

    Args:
        free_bytes: of the GPU; an engine alone there takes no more.
        share: that part, if a setting says it.
        neighbours: other engines there, each with as large a part.

    Example: beside 16 GB of weights and 3 GiB to work in, an engine alone on 141 GB has 107.7 GB.

    Raises:
        ModelError: the weights leave nothing.
    """
    part = int(total_bytes * (share if share is not None else GPU_SHARE / (1 + neighbours)))
    if share is None and not neighbours:
        part = min(part, int(0.98 * free_bytes))  # vLLM takes some before it compares
    left = part - weight_bytes - WORK_BYTES
    if left <= 0:
        gib = 2**30
        said = f"generation.gpu_share = {share:g}" if share is not None else f"{1 + neighbours} engines on a GPU"
        raise ModelError(
            f"weights of {weight_bytes / gib:.1f} GiB and {WORK_BYTES / gib:.1f} GiB to work in leave no KV cache of "
            f"the {part / gib:.1f} GiB that each engine has by {said}, of {total_bytes / gib:.1f} with "
            f"{free_bytes / gib:.1f} free; raise generation.tensor_parallel_size or generation.gpu_share, or lower "
            "generation.num_generators"
        )
    return left


def has_gpu_driver() -> bool:
    """Whether this machine may have GPUs. False saves asking torch, which takes seconds to import."""
    return any(os.path.exists(driver) for driver in _DRIVERS)


def planned_kv_gib(kv_cache_gib: float | None) -> float | None:
    """The KV cache of one engine as far as this machine tells without a look at its GPUs; None if that is needed."""
    return None if kv_cache_gib is None and has_gpu_driver() else kv_cache_gib or CPU_KV_GIB


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a Hugging Face folder's weights in a dtype, from the headers of its files."""
    return _ITEMSIZE[dtype] * sum(map(_numel, sorted(folder.glob("*.safetensors"))))


def _numel(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = parse_json(file.read(length))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
