"""Optimizers by name, either the library's or yours as "module:function", and their arguments.

Importing this module imports no optimizer and no torch: the library's optimizers are also given as "module:function".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_rl.core.calls.imports import find_function
from titan_rl.training.choices import StateDType

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


NamedParameters = Sequence[tuple[str, "nn.Parameter"]]
"""Pairs of a parameter's name in the model, such as "layers.0.attention.wo.weight", and the parameter. torch's
optimizers accept them."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The settings of `[training]` for an optimizer.

    `state_dtype` and `offload` are for adam and adamw, and have their defaults for every other optimizer.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    state_dtype: StateDType = "float32"  # training.optimizer_dtype
    offload: bool = False  # whether training.offload has "optimizer" or "parameters"


OptimizerFn = Callable[[NamedParameters, OptimizerSpec], "Optimizer | list[Optimizer]"]
"""Function that builds the optimizers. Each parameter must belong to exactly one of them. The learning rates of their
groups follow the schedule, in constant proportion to `spec.lr`."""


BY_NAME = {
    "adamw": "titan_rl.training.optimizer.optimizers:adamw",
    "adam": "titan_rl.training.optimizer.optimizers:adam",
    "sgd": "titan_rl.training.optimizer.optimizers:sgd",
    "muon": "titan_rl.training.optimizer.optimizers:muon",
}
"""Optimizers of the library, by their names in `training.optimizer`."""


def find_optimizer(name: str) -> OptimizerFn:
    """Look up the function that `training.optimizer` names.

    Raises:
        ConfigError: No optimizer has that name.
    """
    found: Any = find_function("training.optimizer", BY_NAME.get(name, name), BY_NAME)
    return found
