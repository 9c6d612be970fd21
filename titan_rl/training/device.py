"""Device on which this process trains. Importing this module also sets it for torchtitan.

torchtitan reads its device type when its modules are imported, and assumes "cuda" on a machine without an
accelerator. So every module of this package that imports a torchtitan module imports this one first.
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
    """Context in which another thread can read the results of this thread so far without delaying its next operations:
    a separate stream on a GPU."""
    if local_device().type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


_torchtitan.device_type = local_device().type
