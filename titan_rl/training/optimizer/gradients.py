"""From summed gradients to those that the optimizer is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from titan_rl.training.parallel.parallel import full_tensor


def average_and_clip(parameters: Sequence[nn.Parameter], denominator: float, max_norm: float) -> float:
    """Divide the gradients in place, and scale them down to `max_norm` if their total norm is larger. All ranks call
    this at the same time.

    Returns:
        the norm before clipping.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_div_(gradients, denominator)
    norm = full_tensor(torch.nn.utils.get_total_norm(gradients))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)
