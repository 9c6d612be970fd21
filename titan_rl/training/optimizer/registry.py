"""Optimizers by name: those of the library, or the user's as "module:function"; and the arguments of one.

Importing this module imports no optimizer and no torch: the library's optimizers are named as a user's are.
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
"""torchtitan's names, such as "layers.0.attention.wo.weight". torch's optimizers take such pairs as they are."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The settings of `[training]` that an optimizer is made with.

    The last two are for adam and adamw, and as they are by default for every other optimizer.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    state_dtype: StateDType = "float32"  # training.optimizer_dtype
    offload: bool = False  # training.offload_optimizer or training.offload_parameters


OptimizerFn = Callable[[NamedParameters, OptimizerSpec], "Optimizer | list[Optimizer]"]
"""Every parameter goes to one of the optimizers. The learning rates of their groups stay in the proportion that they
have to `spec.lr`, and follow its schedule."""


BY_NAME = {
    "adamw": "titan_rl.training.optimizer.optimizers:adamw",
    "adam": "titan_rl.training.optimizer.optimizers:adam",
    "sgd": "titan_rl.training.optimizer.optimizers:sgd",
    "muon": "titan_rl.training.optimizer.optimizers:muon",
}
"""Optimizers of the library, by their names in `training.optimizer`."""


def find_optimizer(name: str) -> OptimizerFn:
    """The function that `training.optimizer` names.

    Raises:
        ConfigError: there is none of that name.
    """
    found: Any = find_function("training.optimizer", BY_NAME.get(name, name), BY_NAME)
    return found
