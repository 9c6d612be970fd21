"""Verification that a bfloat16 generator has loaded a version, with vLLM and torchtitan on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from depth import in_depth
from e2e.tiny_policy import make_tiny_qwen3, on_policy_samples

from titan_rl.core.errors import VerificationError
from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.training.publishing import WeightPublisher
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.verification import ProbeFigures, SwapCheck


class Run:
    """A publishing trainer and the engine under verification."""

    def __init__(self, folder: Path, engine: VLLMEngine, root: Path, *, lr: float, num_probes: int) -> None:
        self.trainer = TrainerCore(
            ModelConfig(path=str(folder), dtype="bfloat16"), TrainingConfig(steps=10, lr=lr), seed=0
        )
        self.transport = SharedMemoryTransport("run", root=root)
        self.publisher = WeightPublisher(self.trainer, self.transport, num_probes=num_probes)
        self.engine, self.swaps = engine, SwapCheck()
        self.manifest = self.publisher.publish()
        self.pull()

    def step(self) -> None:
        self.trainer.step(on_policy_samples(self.trainer, *[60] * 12))
        self.manifest = self.publisher.publish()

    def pull(self, *, without: str | None = None) -> ProbeFigures:
        """Load the newest version, except tensors whose names contain `without`, and verify it."""
        items = [pair for pair in self.transport.pull(self.manifest) if without is None or without not in pair[0]]
        self.engine.load_state_dict(items, self.manifest.version)
        return self.verify()

    def verify(self) -> ProbeFigures:
        return self.swaps.verify(self.manifest, self.engine.score)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(EngineSpec(str(folder), dtype="bfloat16", max_context=256, kv_cache_gib=0.05))
    yield engine
    engine.close()


def test_detects_a_missing_update_of_one_layer(folder: Path, engine: Any, tmp_path: Path) -> None:
    run = Run(folder, engine, tmp_path, lr=3e-4, num_probes=32)
    before = run.manifest
    run.step()
    for layer in range(2):
        engine.load_state_dict(run.transport.pull(before), 0)
        with pytest.raises(VerificationError, match="not loaded"):
            run.pull(without=f"layers.{layer}.")
    figures = run.pull()
    assert figures.missed <= figures.margin < 0.1
    run.publisher.close()


@in_depth
def test_detects_a_skipped_swap_at_learning_rate_3e_6(folder: Path, engine: Any, tmp_path: Path) -> None:
    run = Run(folder, engine, tmp_path, lr=3e-6, num_probes=512)
    run.step()
    with pytest.raises(VerificationError, match="not loaded"):
        run.verify()
    figures = run.pull()
    assert figures.missed <= figures.margin < 0.5
    run.publisher.close()
