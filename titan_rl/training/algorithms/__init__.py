"""Learning algorithms that `training.algorithm` names: one file each, or yours as "module:value"."""

from __future__ import annotations

from titan_rl.core.calls.imports import find_function
from titan_rl.training.algorithms.algorithm import Algorithm, Term
from titan_rl.training.algorithms.cispo import CISPO
from titan_rl.training.algorithms.distillation import DISTILLATION
from titan_rl.training.algorithms.dr_grpo import DR_GRPO
from titan_rl.training.algorithms.grpo import GRPO
from titan_rl.training.algorithms.gspo import GSPO
from titan_rl.training.algorithms.ppo import PPO
from titan_rl.training.algorithms.rae import RAE
from titan_rl.training.algorithms.reinforce import REINFORCE
from titan_rl.training.algorithms.rloo import RLOO
from titan_rl.training.algorithms.sft import SFT

__all__ = ["BY_NAME", "Algorithm", "Term", "find_algorithm"]

BY_NAME: dict[str, Algorithm] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce": REINFORCE,
    "rae": RAE,
    "ppo": PPO,
    "distillation": DISTILLATION,
    "sft": SFT,
}
"""Algorithms of the library, by their names in `training.algorithm`."""


def find_algorithm(name: str) -> Algorithm:
    """Look up the algorithm that `training.algorithm` names.

    Raises:
        ConfigError: No algorithm has that name.
    """
    return find_function("training.algorithm", name, BY_NAME, Algorithm)
