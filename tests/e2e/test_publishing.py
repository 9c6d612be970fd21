"""A version is copied while the next step computes, and the optimizer waits for the copy."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_policy import make_tiny_qwen3, make_trainer, on_policy_samples, weights

from titan_rl.core.errors import StateDictError
from titan_rl.training import publishing
from titan_rl.training.algorithms.grpo import grpo_loss
from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss
from titan_rl.training.publishing import ProbeDefaults, WeightPublisher
from titan_rl.training.trainer import TrainerCore
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.types import Manifest

forward_done, stepped = threading.Event(), threading.Event()
actor: ContextVar[str] = ContextVar("actor", default="none")
callers: list[str] = []


def noting_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    forward_done.set()
    return grpo_loss(tokens, clip)


class LateTransport(SharedMemoryTransport):
    """Copies after a forward pass of the next step, and checks that the step does not finish before the copy."""

    late = False

    def publish(self, version: int, named_tensors: Any, **rest: Any) -> Manifest:
        if self.late:
            assert forward_done.wait(300)
            assert not stepped.wait(0.5), "the optimizer changed weights that were not copied yet"
        return super().publish(version, named_tensors, **rest)


class FullTransport(SharedMemoryTransport):
    def publish(self, version: int, named_tensors: Any, **rest: Any) -> Manifest:
        assert forward_done.wait(300)
        raise StateDictError("no room")


@pytest.fixture(autouse=True)
def fresh_events() -> None:
    forward_done.clear()
    stepped.clear()


def step(trainer: TrainerCore, samples: Any) -> dict[str, float]:
    metrics = trainer.step(samples).metrics
    stepped.set()
    return metrics


def test_forward_overlaps_the_copy_and_optimizer_waits_for_it(tmp_path: Path) -> None:
    trainer = make_trainer(make_tiny_qwen3(tmp_path), lr=1e-2, loss=f"{__name__}:noting_loss")
    samples = on_policy_samples(trainer, 24, 33)
    before = {name: tensor.clone() for name, tensor in weights(trainer).items()}
    with LateTransport("test-publishing") as transport, ThreadPoolExecutor(1) as thread:
        publisher = WeightPublisher(trainer, transport, num_probes=1)
        transport.late = True
        publisher.begin()
        metrics = thread.submit(step, trainer, samples)
        manifest = publisher.finish()
        assert metrics.result(60)["wait_for_copy_s"] > 0
        assert trainer.version == 1
        assert manifest.version == 0
        pulled = dict(transport.pull(manifest))
        assert all(torch.equal(tensor, before[name]) for name, tensor in pulled.items())
        assert not all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
        publisher.close()


def test_publish_failure_is_raised_and_does_not_stop_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(make_tiny_qwen3(tmp_path), loss=f"{__name__}:noting_loss")
    samples = on_policy_samples(trainer, 24)
    with FullTransport("test-publishing-full") as transport:
        publisher = WeightPublisher(trainer, transport, num_probes=1)
        publisher.begin()
        with monkeypatch.context() as patch:
            patch.setattr(publishing, "READ_LIMIT_S", 0.01)
            with pytest.raises(StateDictError, match=r"not published within 0\.01 s"):
                publisher.finish()
        step(trainer, samples)
        assert trainer.version == 1
        with pytest.raises(StateDictError, match="no room"):
            publisher.finish()
        publisher.close()


def test_publishes_a_version_without_probes(tmp_path: Path) -> None:
    trainer = make_trainer(make_tiny_qwen3(tmp_path))
    with SharedMemoryTransport("test-publishing-unverified") as transport:
        publisher = WeightPublisher(trainer, transport, num_probes=0)
        publisher.begin()
        assert publisher.finish().probes == ()
        publisher.close()


class SendingTransport(SharedMemoryTransport):
    """Records the actor context of its callers, which Monarch's transports depend on."""

    def publish(self, version: int, named_tensors: Any, **rest: Any) -> Manifest:
        callers.append(actor.get())
        return super().publish(version, named_tensors, **rest)

    def release(self, version: int) -> None:
        callers.append(actor.get())
        super().release(version)


def test_transport_is_called_in_the_context_of_the_publishing_actor(tmp_path: Path) -> None:
    trainer = make_trainer(make_tiny_qwen3(tmp_path))
    samples = on_policy_samples(trainer, 24)
    callers.clear()
    actor.set("trainer")
    with SendingTransport("test-publishing-context") as transport:
        publisher = WeightPublisher(trainer, transport, num_probes=0)
        for _ in range(3):
            publisher.publish()
            step(trainer, samples)
        publisher.close()
    assert callers == ["trainer"] * 4  # three versions are published, and the first is released


@pytest.mark.parametrize(
    ("dtype", "device_type", "rounding"),
    [(torch.float32, "cpu", 1e-6), (torch.float32, "cuda", 2e-3), (torch.bfloat16, "cuda", 2e-2)],
)
def test_probe_tolerance_covers_device_rounding(dtype: torch.dtype, device_type: str, rounding: float) -> None:
    # measured between this trainer and vLLM; GPUs multiply float32 as TF32
    assert 2 * rounding < ProbeDefaults.of(dtype, device_type).tolerance < 20 * rounding
