"""vLLM's engine with CUDA graphs, and whole runs over each transport. Skipped without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import torch
from e2e.runs import run_training
from e2e.tiny_policy import make_tiny_moe, make_tiny_qwen3, on_policy_samples, sequences

from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore
from titan_rl.types import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the CPU path has its own tests")

NEAR = 2e-2  # tolerance of mean logprobs in float32, as kernels differ


def make_trainer(folder: Path) -> TrainerCore:
    return TrainerCore(ModelConfig(path=str(folder)), TrainingConfig(steps=10, lr=1e-2), seed=0)


def assert_scores_as(engine: VLLMEngine, trainer: TrainerCore) -> None:
    for mine, theirs in zip(trainer.score(sequences(40, 64)), engine.score(sequences(40, 64)), strict=True):
        assert (torch.tensor(mine) - torch.tensor(theirs)).abs().mean() < NEAR


@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_moe])
def test_hot_swap_under_cuda_graphs_with_running_requests(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    trainer = make_trainer(folder)
    engine = VLLMEngine(EngineSpec(str(folder), max_context=256, kv_cache_gib=1.0))
    samples = on_policy_samples(trainer, 64, 48)
    for number in range(8):
        sampling = SamplingParams(max_tokens=96, min_tokens=96, temperature=1.0)
        engine.add(EngineRequest(f"r{number}", [1 + number, 2, 3], sampling))
    counts = dict.fromkeys((f"r{number}" for number in range(8)), 0)
    for version in range(1, 4):
        for _ in range(8):
            for delta in engine.step():
                counts[delta.request_id] += len(delta.token_ids)
        trainer.step(samples)
        engine.load_state_dict(list(trainer.named_tensors()), version)
        assert_scores_as(engine, trainer)  # while the requests run
    for _ in range(200):
        for delta in engine.step():
            counts[delta.request_id] += len(delta.token_ids)
    assert set(counts.values()) == {96}
    engine.close()


def test_sleeping_engine_frees_memory_and_wakes_with_new_weights(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")
    trainer = make_trainer(folder)
    engine = VLLMEngine(EngineSpec(str(folder), max_context=256, kv_cache_gib=2.0, sleeps=True))
    awake, _ = torch.cuda.mem_get_info()
    engine.sleep()
    asleep, _ = torch.cuda.mem_get_info()
    assert asleep - awake > 1.5 * 2**30
    trainer.step(on_policy_samples(trainer, 64, 48))
    engine.wake()
    engine.load_state_dict(list(trainer.named_tensors()), 1)
    assert_scores_as(engine, trainer)
    engine.close()


def test_engine_returns_routed_experts_of_each_token(tmp_path: Path) -> None:
    folder = make_tiny_moe(tmp_path / "model")
    engine = VLLMEngine(EngineSpec(str(folder), max_context=256, kv_cache_gib=1.0, routed_experts=True))
    sampling = SamplingParams(max_tokens=12, min_tokens=12, temperature=1.0, return_routed_experts=True)
    engine.add(EngineRequest("r", [1, 2, 3], sampling))
    tokens, rows = 0, 0
    for _ in range(40):
        for delta in engine.step():
            tokens += len(delta.token_ids)
            rows += len(delta.routed_experts) if delta.routed_experts is not None else 0
    assert (tokens, rows) == (12, 12)
    engine.close()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "rdma", "cuda_ipc"])
def test_five_step_run_over_each_transport(transport: str, tmp_path: Path) -> None:
    pytest.importorskip("monarch")
    with run_training(tmp_path, training__steps=5, statedict__transport=transport, generation__kv_cache_gib=1) as run:
        assert run.wait(300) == 0, run.output
        steps = [record for record in run.metrics() if "train/loss" in record]
        assert len(steps) == 5
        assert all(record.get("train/on_policy_logprob_diff_mean", 0) < NEAR for record in steps)
