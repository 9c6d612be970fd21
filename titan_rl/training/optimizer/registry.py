"""The optimizers by name: the library's own, or the user's as "module:function".

Importing this imports no optimizer, nor torch: the library's own are named as a user's are.
"""

from __future__ import annotations

from typing import Any

from titan_rl.core.calls.imports import find_function
from titan_rl.training.optimizer.types import OptimizerFn

BY_NAME = {
    "adamw": "titan_rl.training.optimizer.optimizers:adamw",
    "adam": "titan_rl.training.optimizer.optimizers:adam",
    "sgd": "titan_rl.training.optimizer.optimizers:sgd",
    "muon": "titan_rl.training.optimizer.optimizers:muon",
}
"""The library's own that `training.optimizer` names."""


def find_optimizer(name: str) -> OptimizerFn:
    """The function that `training.optimizer` names.

    Raises:
        ConfigError: there is none of that name.
    """
    found: Any = find_function("training.optimizer", BY_NAME.get(name, name), BY_NAME)
    return found
