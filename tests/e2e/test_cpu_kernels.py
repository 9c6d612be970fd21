"""Replacements of vLLM's layers on CPUs."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("vllm")


@pytest.mark.parametrize("size", [24, 32, 128])  # the kernels do not support rows of 24
@pytest.mark.parametrize("is_strided", [False, True])
def test_cpu_rms_norm_matches_vllm(size: int, is_strided: bool) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    from titan_rl.generation.vllm_cpu import normalize

    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        norm: Any = RMSNorm(size)
        norm.weight.data.normal_()
        x, residual = torch.randn(2, 7, 3, 3 * size)[..., size : 2 * size]
        if not is_strided:
            x, residual = x.contiguous(), residual.contiguous()
        expected = norm.forward_native(x.clone(), residual.clone())
        torch.testing.assert_close(normalize(norm, x), norm.forward_native(x))
        torch.testing.assert_close(normalize(norm, x, residual), expected)
