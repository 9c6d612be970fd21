"""Mixtures of experts, tied models, shared prompts and small optimizer states at GPU sizes. Skipped without a GPU."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.sharded_steps import steps_and_resumed_steps
from e2e.tiny_policy import make_tiny_llama3, make_tiny_moe, make_tiny_qwen3, on_policy_samples, sequences
from e2e.warm import run_world
from training.test_experts import by_loop, experts

from titan_rl.training.attention.attention import layout_documents
from titan_rl.training.attention.documents import Document
from titan_rl.training.attention.flex_attention import layout_blocks
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the CPU path has its own tests")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_grouped_experts_match_a_loop_over_128_experts(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    module = experts(128, 1024, 768).to("cuda", dtype)
    counts = torch.bincount(torch.randint(128, (16_384,)), minlength=128)
    x = (torch.randn(16_384, 1024, device="cuda") / 8).to(dtype).requires_grad_()
    weights = [module.w1_EFD, module.w2_EDF, module.w3_EFD]
    found, expected = module(x, counts.cuda()), by_loop(x, [w.unbind() for w in weights], counts.tolist())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    gradients = [torch.autograd.grad(out.float().square().mean(), [x, *weights]) for out in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


@pytest.mark.parametrize("lay_out", [layout_documents, layout_blocks])
def test_long_shared_prompts_keep_no_attention_scores(lay_out: Any) -> None:
    documents = [Document(1024), *(Document(2048, 0, 1024) for _ in range(7))]
    tokens, heads, kv_heads, head_dim = 1024 + 7 * 2048, 16, 8, 128
    qkv = [
        torch.randn(1, tokens, count, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    ]
    layout = lay_out(documents, "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layout.attend(*qkv).float().square().mean().backward()
    peak = torch.cuda.max_memory_allocated() - before
    scores = heads * 7 * 2048 * 3072
    assert peak < 2 * scores, "torch's math kernel keeps 12 bytes of each score"


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_trainer_with_small_optimizer_states_learns_and_resumes(name: str, tmp_path: Path) -> None:
    make = {"qwen3": make_tiny_qwen3, "llama": make_tiny_llama3, "qwen3_moe": make_tiny_moe}[name]
    folder = make(tmp_path / "model") if name == "qwen3_moe" else make(tmp_path / "model", tied=True)  # pyright: ignore[reportCallIssue]
    small = {"optimizer_dtype": "int8", "master_dtype": "bfloat16", "offload": ("optimizer",)}
    trainer = TrainerCore(
        ModelConfig(path=str(folder), dtype="bfloat16"), TrainingConfig(steps=20, lr=1e-3, **small), seed=0
    )
    samples = on_policy_samples(trainer, 64, 48, 80)
    losses = [trainer.step(samples).metrics["loss"] for _ in range(10)]
    assert losses[-1] < losses[0]
    trainer.save(tmp_path / "step-000010")
    expected = trainer.step(samples).metrics["loss"]
    trainer.load(tmp_path / "step-000010")
    assert trainer.step(samples).metrics["loss"] == pytest.approx(expected, abs=1e-3)


def test_gradients_are_freed_between_steps(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model", vocab_size=50_000)
    gc.collect()
    before = torch.cuda.memory_allocated()
    trainer = TrainerCore(ModelConfig(path=str(folder)), TrainingConfig(steps=5), seed=0)
    samples = on_policy_samples(trainer, 64)
    trainer.step(samples)
    held = torch.cuda.memory_allocated() - before
    count = sum(tensor.numel() for _, tensor in trainer.named_tensors())
    assert held < 4.5 * 3 * count, "weights and two moments"


@pytest.mark.parametrize(
    "small", [{}, {"optimizer_dtype": "int8", "master_dtype": "bfloat16"}, {"offload": ("parameters",)}]
)
def test_two_gpus_match_one(small: dict[str, Any], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = make_tiny_qwen3(tmp_path / "model")
    by_one = {name: value for name, value in small.items() if name != "offload"}  # offloading needs several ranks
    alone, _ = steps_and_resumed_steps(folder, tmp_path / "one", **by_one)
    for losses, resumed in run_world(on_own_gpu, 2, folder=folder, out=tmp_path / "two", data_parallel=2, **small):
        assert losses == pytest.approx(alone, abs=0.05)
        assert resumed == pytest.approx(losses[-2:], abs=1e-3)


def on_own_gpu(folder: Path, out: Path, **training: Any) -> Any:
    """`steps_and_resumed_steps` on the GPU of this rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return steps_and_resumed_steps(folder, out, **training)


@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_llama3])
def test_vllm_scores_match_a_tied_model(make: Any, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from titan_rl.generation.engine import EngineSpec
    from titan_rl.generation.vllm_engine import VLLMEngine

    folder = make(tmp_path / "model", tied=True)
    trainer = TrainerCore(ModelConfig(path=str(folder)), TrainingConfig(steps=5, lr=1e-3), seed=0)
    trainer.step(on_policy_samples(trainer, 64, 48))
    engine = VLLMEngine(EngineSpec(str(folder), max_context=256, kv_cache_gib=1.0))
    engine.load_state_dict(list(trainer.named_tensors()), 1)
    for mine, theirs in zip(trainer.score(sequences(40, 64)), engine.score(sequences(40, 64)), strict=True):
        assert (torch.tensor(mine) - torch.tensor(theirs)).abs().mean() < 1e-2
    engine.close()
