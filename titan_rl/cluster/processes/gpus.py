"""Which GPUs this machine has."""

from __future__ import annotations

import os
import subprocess

from titan_rl.generation.gpu_share import has_gpu_driver


def visible_gpus() -> tuple[str, ...]:
    """Those that this process may use, found without taking hold of one."""
    if not has_gpu_driver():
        return ()
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return tuple(map(str, range(count))) if named is None else tuple(named.split(",")[:count])


def least_gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this machine, found without taking hold of one; None where nvidia-smi is missing
    or does not say."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in told.splitlines()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
