"""Norm of the gradient, by which it is clipped."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from torch import nn

from titan_rl.training.gradient_pass import average_and_clip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reported_norm_is_the_norm_of_the_gradient_in_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(8, 64, 96), (64,), *[(7, 5)] * 300]]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    gradients = [torch.clone(parameter.grad).double() for parameter in parameters if parameter.grad is not None]
    expected = float(torch.cat([gradient.flatten() for gradient in gradients]).norm()) / 4

    assert average_and_clip(parameters, 4.0, max_norm=1.0) == pytest.approx(expected, rel=1e-5)

    clipped = [parameter.grad.double().flatten() for parameter in parameters if parameter.grad is not None]
    assert float(torch.cat(clipped).norm()) == pytest.approx(1.0, rel=1e-2 if dtype is torch.bfloat16 else 1e-5)
