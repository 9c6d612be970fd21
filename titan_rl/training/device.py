"""The device this process trains on. Importing this module settles it for torchtitan, too.

torchtitan reads its device type when its modules are imported, and assumes "cuda" on a machine without an
accelerator. So whatever imports a torchtitan module in this package imports this one first.
"""

from __future__ import annotations

from typing import Any

import torch

from titan_rl.extras import require

_torchtitan: Any = require("torchtitan.tools.utils", "cpu")


def local_device() -> torch.device:
    """The accelerator that is current in this process, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


_torchtitan.device_type = local_device().type
