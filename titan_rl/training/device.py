"""The device this process trains on. Importing this module settles it for torchtitan, too.

torchtitan reads its device type when its modules are imported, and assumes "cuda" on a machine without an
accelerator. So whatever imports a torchtitan module in this package imports this one first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from titan_rl.core.calls.imports import require

_torchtitan: Any = require("torchtitan.tools.utils", "cpu")


def local_device() -> torch.device:
    """The accelerator that is current in this process, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def side_stream() -> AbstractContextManager[object]:
    """Context in which another thread can read what this one has computed so far, without delaying what this one issues
    next: a stream of its own on an accelerator."""
    if local_device().type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


_torchtitan.device_type = local_device().type
