"""What an optimizer is made by, and of what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

NamedParameters = Sequence[tuple[str, "nn.Parameter"]]
"""torchtitan's names, such as "layers.0.attention.wo.weight". torch's optimizers take such pairs as they are."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What is asked of an optimizer: the settings of `[training]` that have these names."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0


OptimizerFn = Callable[[NamedParameters, OptimizerSpec], "Optimizer | list[Optimizer]"]
"""Every parameter goes to one of the optimizers. The learning rates of their groups stay in the proportion that they
have to `spec.lr`, and follow its schedule."""
