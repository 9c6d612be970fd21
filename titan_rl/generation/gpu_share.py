"""Share of a GPU's memory that an engine takes, so that others fit on the same GPU."""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ModelError

WORK_BYTES = 3 * 2**30
"""Memory for the CUDA context, captured graphs and activations of a step. An estimate: a model with a large vocabulary
and many running requests may need more, which `generation.gpu_share` allows."""

CPU_KV_GIB = 1.0
"""Default size of the KV cache of an engine on a CPU, or on a trainer's GPU."""

GPU_SHARE = 0.9
"""Share of a GPU's memory that its engines fill by default."""

_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")  # NVIDIA, NVIDIA Tegra, AMD, WSL

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def gpu_share_of(total_bytes: int, *, weight_bytes: int, kv_bytes: int) -> float:
    """Share of a GPU's memory that weights, KV cache and work space need.

    Example: 16 GB of weights and 20 GB of KV cache are 0.28 of 141 GB.

    Raises:
        ModelError: together they need more memory than the GPU has.
    """
    need = weight_bytes + kv_bytes + WORK_BYTES
    if need > total_bytes:
        gib = 2**30
        left = max(0.0, (total_bytes - weight_bytes - WORK_BYTES) / gib)
        raise ModelError(
            f"weights of {weight_bytes / gib:.1f} GiB, a KV cache of {kv_bytes / gib:.1f} GiB and "
            f"{WORK_BYTES / gib:.1f} GiB of work space do not fit a GPU of {total_bytes / gib:.1f} GiB; lower "
            f"generation.kv_cache_gib to at most {left:.1f}, or raise generation.tensor_parallel_size"
        )
    return need / total_bytes


def kv_bytes_of(total_bytes: int, free_bytes: int, *, weight_bytes: int, share: float | None, neighbours: int) -> int:
    """Bytes of the KV cache that fills an engine's share of a GPU.

    Args:
        total_bytes: Memory of the GPU.
        free_bytes: Free memory of the GPU, which limits an engine without neighbours.
        weight_bytes: Memory of the engine's weights.
        share: Share of the GPU's memory, if it is set.
        neighbours: Number of other engines on the GPU, each with an equal share.

    Example: with 16 GB of weights and 3 GiB of work space, a single engine on 141 GB has 107.7 GB.

    Raises:
        ModelError: the weights leave no memory.
    """
    part = int(total_bytes * (share if share is not None else GPU_SHARE / (1 + neighbours)))
    if share is None and not neighbours:
        part = min(part, int(0.98 * free_bytes))  # vLLM allocates some memory before it checks this
    left = part - weight_bytes - WORK_BYTES
    if left <= 0:
        gib = 2**30
        reason = f"generation.gpu_share = {share:g}" if share is not None else f"{1 + neighbours} engines on a GPU"
        raise ModelError(
            f"weights of {weight_bytes / gib:.1f} GiB and {WORK_BYTES / gib:.1f} GiB of work space leave no KV cache "
            f"out of the {part / gib:.1f} GiB of each engine ({reason}; the GPU has {total_bytes / gib:.1f} GiB, with "
            f"{free_bytes / gib:.1f} free); raise generation.tensor_parallel_size or generation.gpu_share, or lower "
            "generation.num_generators"
        )
    return left


def has_gpu_driver() -> bool:
    """Whether this machine may have GPUs. False saves the import of torch, which takes seconds."""
    return any(os.path.exists(driver) for driver in _DRIVERS)


def planned_kv_gib(kv_cache_gib: float | None) -> float | None:
    """Size of the KV cache of one engine. None if it depends on the memory of a GPU."""
    return None if kv_cache_gib is None and has_gpu_driver() else kv_cache_gib or CPU_KV_GIB


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a Hugging Face folder's weights in a dtype, from the headers of its files."""
    return _ITEMSIZE[dtype] * sum(prod(shape) for shape in _shapes(folder).values())


def adapter_bytes(folder: Path, dtype: str, targets: Collection[str], *, rank: int) -> int:
    """Bytes that an engine reserves for one LoRA adapter: rank x (in + out) numbers for each matrix that it changes.

    Tensor-parallel ranks share a part of these bytes, which is not subtracted.

    Args:
        folder: Hugging Face folder with the matrices.
        dtype: Dtype of the adapter.
        targets: Last parts of the names of the changed layers.
        rank: Rank of the adapter.
    """
    return _ITEMSIZE[dtype] * rank * adapted_width(_shapes(folder), targets)


def adapted_width(shapes: Mapping[str, Sequence[int]], targets: Collection[str]) -> int:
    """Sum of in + out over the matrices that a LoRA adapter changes: its number of parameters at rank 1. Biases and the
    matrices of experts do not change.

    Args:
        shapes: Shapes of a model's weights by their names.
        targets: Last parts of the names of the changed layers.
    """
    return sum(
        sum(shape)
        for name, shape in shapes.items()
        if name.split(".")[-2:-1] in [[target] for target in targets] and len(shape) == 2 and ".experts." not in name
    )


def _shapes(folder: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parse_json(file.read(length))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes
