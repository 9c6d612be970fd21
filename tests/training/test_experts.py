"""Grouped expert matrices compared with a loop over the experts in float64."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from titan_rl.training.models.experts import Experts, grouped_linear

COUNTS = [3, 0, 7, 1, 0, 5]


def experts(num_experts: int, dim: int, hidden_dim: int) -> Any:
    made = Experts.Config(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts).build()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 8)
    return made


def by_loop(x_RD: torch.Tensor, weights: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    w1, w2, w3 = weights
    rows = enumerate(x_RD.split(counts))
    return torch.cat([F.linear(F.silu(F.linear(x, w1[e])) * F.linear(x, w3[e]), w2[e]) for e, x in rows])


@pytest.mark.parametrize("sizes", [(64, 48), (6, 5)], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("counts", [COUNTS, [0] * 6, [16, 0, 0, 0, 0, 0]])
@pytest.mark.parametrize("expanded", [False, True])
def test_grouped_experts_match_a_loop_over_experts(sizes: tuple[int, int], counts: list[int], expanded: bool) -> None:
    torch.manual_seed(0)
    module = experts(6, *sizes)
    x_RD = torch.randn(sum(counts), sizes[0], requires_grad=True)
    weights = [weight.detach().double().requires_grad_() for weight in (module.w1_EFD, module.w2_EDF, module.w3_EFD)]
    reference_RD = x_RD.detach().double().requires_grad_()
    found, expected = module(x_RD, torch.tensor(counts)), by_loop(reference_RD, weights, counts)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    scale = torch.ones(()).expand_as(found) if expanded else torch.randn_like(found).T.contiguous().T
    found.backward(scale)
    expected.backward(scale.double())
    pairs = zip([module.w1_EFD, module.w2_EDF, module.w3_EFD, x_RD], [*weights, reference_RD], strict=True)
    for parameter, reference in pairs:
        torch.testing.assert_close(parameter.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


def test_grouped_linear_respects_autocast_dtype() -> None:
    weight, x = torch.randn(6, 32, 16), torch.randn(sum(COUNTS), 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_linear(x, weight, torch.tensor(COUNTS)).dtype is torch.bfloat16
    assert grouped_linear(x, weight, torch.tensor(COUNTS)).dtype is torch.float32


class AllocationCounter(TorchDispatchMode):
    """Counts the elements of the tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, list | tuple) else [result]
        self.elements += sum(each.numel() for each in made if isinstance(each, torch.Tensor))
        return result


@pytest.mark.parametrize("hidden_dim", [16, 13], ids=["aligned", "not aligned"])
def test_backward_allocations_scale_linearly_with_experts(hidden_dim: int) -> None:
    def per_parameter(num_experts: int) -> float:
        module = experts(num_experts, 32, hidden_dim)
        x_RD = torch.randn(2 * num_experts, 32)
        out = module(x_RD, torch.full((num_experts,), 2)).sum()
        with AllocationCounter() as allocated:
            out.backward()
        return allocated.elements / sum(parameter.numel() for parameter in module.parameters())

    assert per_parameter(128) < 1.2 * per_parameter(8)
