"""The library's optimizers, and `Optimizers`, which steps those of a run.

A function makes an optimizer from the named parameters of the model and an `OptimizerSpec`. With several ranks the
parameters are DTensors, of which torch's optimizers update each rank's part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from titan_rl.core.errors import ConfigError
from titan_rl.training.device import local_device  # before torchtitan
from titan_rl.training.optimizer.compact_adam import CompactAdam
from titan_rl.training.optimizer.registry import NamedParameters, OptimizerSpec, find_optimizer

# isort: split
from torchtitan.components.checkpointer.utils import canonical_fqn


def adamw(parameters: NamedParameters, spec: OptimizerSpec) -> Optimizer:
    """Adam with decoupled weight decay (arXiv:1711.05101)."""
    return _adam(torch.optim.AdamW, parameters, spec)


def adam(parameters: NamedParameters, spec: OptimizerSpec) -> Optimizer:
    """Adam (arXiv:1412.6980). Weight decay is added to the gradient."""
    return _adam(torch.optim.Adam, parameters, spec)


def sgd(parameters: NamedParameters, spec: OptimizerSpec) -> Optimizer:
    """Gradient descent with the momentum `betas[0]`. Weight decay is added to the gradient."""
    return torch.optim.SGD(
        _tensors(parameters),
        lr=spec.lr,
        momentum=spec.betas[0],
        weight_decay=spec.weight_decay,
        foreach=True,  # fused, it does not take DTensors
    )


def muon(parameters: NamedParameters, spec: OptimizerSpec) -> list[Optimizer]:
    """Muon with the momentum `betas[0]` for the matrices of the layers, and AdamW for the rest: embeddings, the head,
    norms, and experts, which are stacks of matrices.

    Updates of a matrix are about as large as with AdamW at the same learning rate (arXiv:2502.16982, eq. 4).
    """
    matrices = [(name, p) for name, p in parameters if name.startswith("layers.") and p.ndim == 2]
    names = {name for name, _ in matrices}
    return [
        torch.optim.Muon(
            _tensors(matrices),
            lr=spec.lr,
            momentum=spec.betas[0],
            weight_decay=spec.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        adamw([(name, p) for name, p in parameters if name not in names], spec),
    ]


class Optimizers:
    """The optimizers of one model, stepped together.

    Args:
        name: value of `training.optimizer`.

    Raises:
        ConfigError: there is no such `training.optimizer`, it does not return optimizers, or they do not have every
            parameter once.
    """

    def __init__(self, model: nn.Module, name: str, spec: OptimizerSpec) -> None:
        parameters = [(canonical_fqn(fqn), parameter) for fqn, parameter in model.named_parameters()]
        self.parts = _optimizers(name, find_optimizer(name)(parameters, spec))
        _check_parameters(name, self.parts, parameters)
        self._proportions = [float(group["lr"]) / spec.lr for group in self._groups()]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self, lr: float) -> None:
        """Update the parameters at the learning rate `lr`, which replaces the spec's."""
        for group, proportion in zip(self._groups(), self._proportions, strict=True):
            group["lr"] = lr * proportion
        for part in self.parts:
            part.step()

    def _groups(self) -> list[dict[str, Any]]:
        """The current groups: loading a checkpoint replaces them."""
        return [group for part in self.parts for group in part.param_groups]


def _adam(
    optimizer: type[torch.optim.Adam | torch.optim.AdamW], parameters: NamedParameters, spec: OptimizerSpec
) -> Optimizer:
    """torch's fused optimizer for float32 weights and moments on the device, otherwise `CompactAdam`."""
    is_plain = spec.state_dtype == "float32" and not spec.offload
    if not is_plain or any(parameter.dtype is not torch.float32 for _, parameter in parameters):
        return CompactAdam(
            _tensors(parameters),
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            decoupled=optimizer is torch.optim.AdamW,
            state_dtype=spec.state_dtype,
            offload=spec.offload,
            device=local_device(),
        )
    return optimizer(
        _tensors(parameters),
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=True,
    )


def _tensors(parameters: NamedParameters) -> list[nn.Parameter]:
    return [parameter for _, parameter in parameters]


def _optimizers(name: str, made: Any) -> list[Optimizer]:
    parts = made if isinstance(made, list | tuple) else [made]
    if (other := next((part for part in parts if not isinstance(part, Optimizer)), None)) is not None:
        raise ConfigError(f"training.optimizer = {name!r} returns {other!r}; it must return torch.optim.Optimizer")
    return list(parts)


def _check_parameters(name: str, parts: Sequence[Optimizer], parameters: NamedParameters) -> None:
    counts = Counter(id(p) for part in parts for group in part.param_groups for p in group["params"])
    for parameter_name, parameter in parameters:
        if (count := counts[id(parameter)]) != 1:
            raise ConfigError(
                f"training.optimizer = {name!r} has {parameter_name} {count} times; it must give every parameter to "
                "one optimizer. In a group with lr = 0 a parameter stays as it is"
            )
