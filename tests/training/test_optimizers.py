"""Optimizers compared with their formulas, and validation of `training.optimizer`."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from titan_rl.core.errors import ConfigError
from titan_rl.training.optimizer.optimizers import Optimizers
from titan_rl.training.optimizer.registry import NamedParameters, OptimizerSpec
from titan_rl.training.settings import TrainingConfig

LR, WEIGHT_DECAY, BETAS, EPS = 0.01, 0.1, (0.8, 0.9), 1e-3


class Model(nn.Module):
    """A model with the parameter names of a decoder: one matrix, one norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tok_embeddings = nn.Embedding(5, 4, _weight=torch.randn(5, 4, generator=generator))
        matrix = nn.Linear(4, 6, bias=False)
        self.layers = nn.ModuleDict({"0": matrix})
        self.norm = nn.LayerNorm(4, bias=False)
        with torch.no_grad():
            matrix.weight.copy_(torch.randn(6, 4, generator=generator))


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def two_steps(optimizer: str, *, weight_decay: float = WEIGHT_DECAY) -> dict[str, torch.Tensor]:
    model = Model()
    optimizers = Optimizers(model, optimizer, OptimizerSpec(LR, betas=BETAS, eps=EPS, weight_decay=weight_decay))
    for step in range(2):
        optimizers.zero_grad()
        for name, gradient in gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        optimizers.step(LR)
    return {name: p.detach() for name, p in model.named_parameters()}


def expected_adam(*, decoupled: bool) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in Model().named_parameters():
        p = parameter.detach().double()
        m = v = torch.zeros_like(p)
        for step in range(2):
            g = gradients(Model(), step)[name].double()
            if decoupled:
                p = p * (1 - LR * WEIGHT_DECAY)
            else:
                g = g + WEIGHT_DECAY * p
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            v = BETAS[1] * v + (1 - BETAS[1]) * g**2
            m_hat, v_hat = m / (1 - BETAS[0] ** (step + 1)), v / (1 - BETAS[1] ** (step + 1))
            p = p - LR * m_hat / (v_hat.sqrt() + EPS)
        found[name] = p.float()
    return found


@pytest.mark.parametrize(("optimizer", "decoupled"), [("adamw", True), ("adam", False)])
def test_adam_and_adamw_match_their_formulas(optimizer: str, decoupled: bool):
    torch.testing.assert_close(two_steps(optimizer), expected_adam(decoupled=decoupled), rtol=0, atol=1e-6)


def test_sgd_applies_momentum_and_weight_decay():
    found = two_steps("sgd")
    for name, parameter in Model().named_parameters():
        p, buffer = parameter.detach(), torch.zeros_like(parameter)
        for step in range(2):
            buffer = BETAS[0] * buffer + gradients(Model(), step)[name] + WEIGHT_DECAY * p
            p = p - LR * buffer
        torch.testing.assert_close(found[name], p, rtol=0, atol=1e-6)


def test_muon_orthogonalizes_matrices_and_leaves_the_rest_to_adamw():
    found, adamw = two_steps("muon", weight_decay=0.0), two_steps("adamw", weight_decay=0.0)
    assert torch.equal(found["tok_embeddings.weight"], adamw["tok_embeddings.weight"])
    assert torch.equal(found["norm.weight"], adamw["norm.weight"])
    model = Model()
    optimizers = Optimizers(model, "muon", OptimizerSpec(LR))
    matrix = model.get_parameter("layers.0.weight")
    before = matrix.detach().clone()
    for name, gradient in gradients(model, 0).items():
        model.get_parameter(name).grad = gradient
    optimizers.step(LR)
    # 0.2 sqrt(max(rows, columns)) gives an orthogonal update the root mean square of one of AdamW's.
    singular = torch.linalg.svdvals(matrix.detach() - before) / (LR * 0.2 * 6**0.5)
    assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3


def test_muon_finds_the_layers_of_either_implementation():
    plain, wrapped = Model(), nn.Module()
    wrapped.add_module("causal", Model())
    muon, _ = Optimizers(wrapped, "muon", OptimizerSpec(LR)).parts
    names = {id(p): name for name, p in wrapped.named_parameters()}
    found = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert found == {f"causal.{name}" for name, _ in plain.named_parameters() if name.startswith("layers.")}


def test_schedule_preserves_learning_rate_ratios_between_groups():
    model = Model()
    optimizers = Optimizers(model, f"{__name__}:slow_norm", OptimizerSpec(LR))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizers.step(LR / 2)
    for name, p in model.named_parameters():
        moved = before[name] - p.detach()
        torch.testing.assert_close(moved, torch.full_like(p, LR / 2 * (0.1 if name == "norm.weight" else 1)))


@pytest.mark.parametrize("name", ["lion", ":f", "module:"])
def test_rejects_unknown_optimizer_name(name: str):
    with pytest.raises(
        ValidationError, match='must be one of adamw, adam, sgd, muon, or your own as "module:function"'
    ):
        TrainingConfig(optimizer=name)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "training.optimizer = '.*:absent': .* has no function absent"),
        ("no_optimizer", "training.optimizer = '.*:no_optimizer' returns 3; it must return torch.optim.Optimizer"),
        ("not_optimizers", r"training.optimizer = '.*:not_optimizers' returns 'sgd'; it must return"),
        ("without_norm", r"training.optimizer = '.*:without_norm' has norm.weight 0 times"),
        ("twice", r"training.optimizer = '.*:twice' has tok_embeddings.weight 2 times"),
    ],
)
def test_rejects_invalid_optimizer_functions(function: str, message: str):
    with pytest.raises(ConfigError, match=message):
        Optimizers(Model(), f"{__name__}:{function}", OptimizerSpec(LR))


def slow_norm(parameters: NamedParameters, spec: OptimizerSpec) -> torch.optim.Optimizer:
    norm = [p for name, p in parameters if name == "norm.weight"]
    others = [p for name, p in parameters if name != "norm.weight"]
    return torch.optim.SGD([{"params": others}, {"params": norm, "lr": spec.lr / 10}], lr=spec.lr)


def no_optimizer(parameters: NamedParameters, spec: OptimizerSpec) -> int:
    return 3


def not_optimizers(parameters: NamedParameters, spec: OptimizerSpec) -> list[str]:
    return ["sgd"]


def without_norm(parameters: NamedParameters, spec: OptimizerSpec) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for name, p in parameters if name != "norm.weight"], lr=spec.lr)


def twice(parameters: NamedParameters, spec: OptimizerSpec) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([p for _, p in parameters], lr=spec.lr) for _ in range(2)]
