"""Which GPUs this machine has."""

from __future__ import annotations

import os

from titan_rl.generation.gpu_share import has_gpu_driver


def visible_gpus() -> tuple[str, ...]:
    """Those that this process may use, found without taking hold of one."""
    if not has_gpu_driver():
        return ()
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return tuple(map(str, range(count))) if named is None else tuple(named.split(",")[:count])
