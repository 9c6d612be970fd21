"""The device this process trains on, settled before any torchtitan model module is imported.

torchtitan reads its device type when its modules are imported and falls back to "cuda" on a machine without an
accelerator. Modules of this package that import torchtitan models import this one first.
"""

from __future__ import annotations

import torch

try:
    from torchtitan.tools import utils as _torchtitan_utils
except ImportError as error:
    from titan_rl.errors import MissingExtraError

    raise MissingExtraError("torchtitan", "cpu") from error

DEVICE_TYPE = (
    accelerator.type if (accelerator := torch.accelerator.current_accelerator(check_available=True)) else "cpu"
)

if DEVICE_TYPE == "cpu":
    _torchtitan_utils.device_type = "cpu"


def local_device() -> torch.device:
    """The accelerator that is current in this process, or the CPU."""
    if DEVICE_TYPE == "cpu":
        return torch.device("cpu")
    return torch.device(DEVICE_TYPE, torch.accelerator.current_device_index())
