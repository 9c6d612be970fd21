"""The losses by name: the library's own, or the user's as "module:function".

Importing this imports no loss, nor torch: the library's own are named as a user's are.
"""

from __future__ import annotations

from typing import Any

from titan_rl.core.calls.imports import find_function
from titan_rl.training.losses.types import LossFn

BY_NAME = {
    "grpo": "titan_rl.training.losses.grpo:grpo_loss",
    "gspo": "titan_rl.training.losses.gspo:gspo_loss",
    "cispo": "titan_rl.training.losses.cispo:cispo_loss",
    "reinforce": "titan_rl.training.losses.reinforce:reinforce_loss",
    "nll": "titan_rl.training.losses.nll:nll_loss",
}
"""The library's own that `training.loss` names."""


def find_loss(name: str) -> LossFn:
    """The loss that `training.loss` names.

    Raises:
        ConfigError: there is none of that name.
    """
    found: Any = find_function("training.loss", BY_NAME.get(name, name), BY_NAME)
    return found
