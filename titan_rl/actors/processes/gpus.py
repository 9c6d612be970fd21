"""Which GPUs this machine has."""

from __future__ import annotations

import os

_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")  # of NVIDIA, its Tegra, AMD, and within WSL


def visible_gpus() -> tuple[str, ...]:
    """Those that this process may use, found without taking hold of one."""
    if not any(os.path.exists(driver) for driver in _DRIVERS):
        return ()  # torch would say so, too, and takes seconds to import
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return tuple(map(str, range(count))) if named is None else tuple(named.split(",")[:count])
