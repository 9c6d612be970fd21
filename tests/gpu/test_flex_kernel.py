"""Kernel of flex attention, forward and backward, alone and in compiled blocks. Skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import make_tiny_qwen3, on_policy_samples

from titan_rl.training.attention.attention import layout_documents
from titan_rl.training.attention.documents import Document
from titan_rl.training.attention.flex_attention import layout_blocks
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the CPU path has its own tests")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 5e-2)])
def test_flex_kernel_matches_bucketed_attention_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    for lengths in [(300, 200, 150), (700, 33, 400), (40, 20, 10)]:
        prefix, *suffixes = lengths
        documents = [Document(prefix), *(Document(length, 0, prefix) for length in suffixes), Document(30)]
        num_tokens = sum(lengths) + 30
        generator = torch.Generator("cuda").manual_seed(0)
        qkv = [
            torch.randn(1, num_tokens, heads, 64, generator=generator, device="cuda", dtype=dtype, requires_grad=True)
            for heads in (4, 2, 2)
        ]
        upstream = torch.randn(qkv[0].shape, generator=generator, device="cuda", dtype=dtype)
        found, expected = (
            lay_out(documents, "cuda").attend(*qkv, scale=0.1) for lay_out in (layout_blocks, layout_documents)
        )
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        gradients = (torch.autograd.grad(out, qkv, upstream) for out in (found, expected))
        for gradient, reference in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=tolerance, atol=5 * tolerance)


def test_compiled_blocks_and_flex_attention_train_in_bfloat16(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")
    settings = {"steps": 20, "lr": 1e-3, "row_tokens": 128}
    plain = TrainerCore(ModelConfig(path=str(folder)), TrainingConfig(**settings), seed=0)
    trainer = TrainerCore(
        ModelConfig(path=str(folder), dtype="bfloat16"),
        TrainingConfig(**settings, attention="flex", compile=True),
        seed=0,
    )
    samples = on_policy_samples(plain, 64, 48, 80)
    expected = plain.step(samples).metrics
    found = trainer.step(samples).metrics
    assert found["on_policy_logprob_diff_max"] < 0.2
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.05)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    losses = [found["loss"], *(trainer.step(samples).metrics["loss"] for _ in range(19))]
    assert losses[-1] < losses[0]
    assert not any("_orig_mod" in name for name, _ in trainer.named_tensors())
