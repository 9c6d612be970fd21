"""`Algorithm`: a learning algorithm as one value, and its description.

An algorithm defines how rewards become advantages, which terms the loss has, and which other models it needs:

    A_i  = advantage(rewards of the siblings)[i]
    loss = sum_t loss(t) / D  +  kl_coef * sum_t kl(t) / D  +  distill_coef * sum_t divergence(t) / T

The denominator D is counted over the whole batch. `average` names it:

    "token"       number of tokens
    "sequence"    number of sequences, after the mean over the tokens of each
    "constant"    number of sequences times model.max_context, after the sum over the tokens of each

Tokens that a correction masks stay in D, so that a mask does not raise the weight of the others. T is the number of
tokens that a teacher has scored. A critic has its own loss and optimizer (`titan_rl.training.critic`).

An algorithm is a preset of settings: `training.algorithm` names it, and each of its settings can be overridden.
Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.core.calls.imports import name_of
from titan_rl.core.errors import ConfigError
from titan_rl.rollout.rewards.advantages import BY_NAME as ADVANTAGES
from titan_rl.rollout.rewards.advantages import AdvantageFn, standardized
from titan_rl.training.choices import Average, CriticKind, DistillKind, KLEstimate
from titan_rl.training.losses import BY_NAME as LOSSES
from titan_rl.training.losses import LossFn

DENOMINATORS: Mapping[Average, str] = {
    "token": "tokens of the batch",
    "sequence": "sequences of the batch, after the mean over the tokens of each",
    "constant": "sequences of the batch times model.max_context, after the sum over the tokens of each",
}


@dataclass(frozen=True, slots=True)
class Term:
    """Term of a loss: its weight and formula, and the denominator of its sum over tokens."""

    name: str
    weight: float
    formula: str
    denominator: str


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A learning algorithm.

    Example: `algorithms/grpo.py`, and a custom algorithm in docs/how_to/algorithm.md.

    Args:
        about: One sentence for people who choose between algorithms.
        source: Paper and equations.
        advantage: Function from the rewards of siblings to their advantages. It must be importable from a module.
        advantage_formula: Formula of the advantage in ASCII.
        loss: Function from the tokens of a micro-batch to the loss of each. It must be importable from a module.
        loss_formula: Formula of one token's loss in ASCII. r is pi_theta / pi_prox, and sg[] stops the gradient.
        average: Denominator of the loss; see the module's docstring.
        clip: Bounds of the ratio, [1 - low, 1 + high]; None if the loss has none.
        kl_coef: Weight of the KL divergence to the reference model; 0 needs no such model.
        kl: Estimate of that divergence.
        distill_coef: Weight of distillation from a teacher; 0 needs no teacher.
        distill: Divergence from the teacher; see `training.distill`.
        critic: Critic that computes the advantages from the rewards; see `training.critic`.
        needs: Requirements in addition to the reference model, such as group sizes.
    """

    about: str
    source: str
    loss: LossFn
    loss_formula: str
    advantage: AdvantageFn = standardized
    advantage_formula: str = "(r_i - mean(r)) / (std(r) + 1e-6), over the siblings of a group"
    average: Average = "token"
    clip: tuple[float, float] | None = None
    kl_coef: float = 0.0
    kl: KLEstimate = "k3"
    distill_coef: float = 0.0
    distill: DistillKind = "sampled"
    critic: CriticKind = "none"
    needs: str = ""

    def settings(self) -> dict[str, Any]:
        """Return the settings of `[training]` that the algorithm sets.

        Raises:
            ConfigError: A function cannot be imported from a module, so other processes could not use it.
        """
        made: dict[str, Any] = {
            "loss": _named("loss", self.loss, LOSSES),
            "average": self.average,
            "advantage": next((name for name, fn in ADVANTAGES.items() if fn is self.advantage), None)
            or _named("advantage", self.advantage, {}),
            "kl_coef": self.kl_coef,
        }
        if self.clip is not None:
            made["clip"] = self.clip
        if self.kl_coef:
            made["kl"] = self.kl
        if self.distill_coef:
            made |= {"distill_coef": self.distill_coef, "distill": self.distill}
        if self.critic != "none":
            made["critic"] = self.critic
        return made

    def terms(self) -> Iterator[Term]:
        """The terms of the loss."""
        yield Term("policy", 1.0, self.loss_formula, DENOMINATORS[self.average])
        if self.kl_coef:
            formula = {"k2": "d^2 / 2", "k3": "exp(d) - d - 1"}[self.kl] + ", d = log pi_ref - log pi_theta"
            yield Term("KL to the reference model", self.kl_coef, formula, DENOMINATORS[self.average])
        if self.distill_coef and self.distill != "sampled":
            formula = {"forward": "KL(pi_T || pi_theta)", "reverse": "KL(pi_theta || pi_T)"}[self.distill]
            formula += " over the teacher's top tokens, with all others merged"
            yield Term("divergence from the teacher", self.distill_coef, formula, "tokens that the teacher has scored")
        if self.critic != "none":
            formula = "1/2 * max((V - target)^2, (V_clip - target)^2), target = A + V before standardization"
            yield Term("value of the critic, with its own optimizer", 1.0, formula, "actions of the minibatch")

    def requirements(self) -> Iterator[str]:
        """Models and data that the algorithm needs."""
        if self.kl_coef:
            yield "the initial model as reference, in memory in addition to the policy"
        if self.distill_coef:
            yield "a teacher with the policy's tokens: training.teacher, and sampling.temperature = 1"
        if self.critic == "model":
            yield 'a critic model, in memory in addition to the policy; not needed with critic = "head"'
        if self.needs:
            yield self.needs


def _named(setting: str, function: Any, known: Mapping[str, str]) -> str:
    """Name of a function as settings give it: the library's own, or "module:function"."""
    name = name_of(function)
    if name is None:
        raise ConfigError(
            f"the algorithm's {setting} is {function!r}, which other processes cannot import; write it as a function "
            "of a module"
        )
    return next((short for short, path in known.items() if path == name), name)
