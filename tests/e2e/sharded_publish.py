"""Functions that each rank runs in tests of publishing."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from e2e.tiny_policy import on_policy_samples, transformers_logprobs
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from titan_rl.core.errors import StateDictError
from titan_rl.training import publishing
from titan_rl.training.publishing import WeightPublisher
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore
from titan_rl.weights.manifest import join
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.types import Manifest


class Rank:
    def __init__(self, model: ModelConfig, training: TrainingConfig) -> None:
        self.folder = model.path
        self.trainer = TrainerCore(model, training, seed=0)
        self.world = self.trainer.world
        self.transport = SharedMemoryTransport(f"sharded-{self.world.rank}")
        with patch.object(publishing, "PROBE_TOKENS", 4):  # all ranks draw them one by one
            self.publisher = WeightPublisher(self.trainer, self.transport, num_probes=2)
        self.samples = on_policy_samples(self.trainer, 50, 41, at_once=True)
        self.reference: Any = None

    def publish(self) -> list[Manifest]:
        """Publish the next version and gather the manifests of all ranks."""
        own = self.publisher.publish()
        return self.world.gather(own)

    def compare(self, manifests: list[Manifest]) -> dict[str, Any]:
        """Compare the tensors that a reader pulls with those that an export gathers."""
        expected = dict(self.trainer.named_tensors())
        found = dict(SharedMemoryTransport("reader").pull(join(manifests)))
        assert list(found) == list(expected)
        return {
            "num_tensors": len(expected),
            "wrong": [
                name
                for name, tensor in expected.items()
                if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)
            ],
            "whole_bytes": sum(tensor.nbytes for tensor in expected.values()),
            "part_bytes": [shard.num_bytes for manifest in manifests for shard in manifest.shards],
            "num_probes": [len(manifest.probes) for manifest in manifests],
            "probe_error": self.probe_error(expected, manifests[0]) if self.world.rank == 0 else 0.0,
        }

    def probe_error(self, published: dict[str, torch.Tensor], manifest: Manifest) -> float:
        """Largest difference between the probes' logprobs and transformers' in float32 with the published weights."""
        if self.reference is None:
            self.reference = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        model = self.reference
        if model.load_state_dict(published, strict=False).unexpected_keys:
            return 0.0  # transformers stores experts in other tensors
        return max(
            float((transformers_logprobs(model, probe.token_ids) - torch.tensor(probe.logprobs)).abs().max())
            for probe in manifest.probes
        )

    def failure(self) -> str:
        """Error of publishing the current version, or an empty string."""
        try:
            self.publisher.publish()
        except StateDictError as error:
            return str(error)
        return ""

    def count_gathered(self) -> int:
        """Number of parameters gathered for a version."""
        with patch.object(DTensor, "full_tensor", autospec=True, side_effect=DTensor.full_tensor) as gather:
            self.trainer.held_slices()
        return gather.call_count

    def three_versions(self) -> dict[str, Any]:
        """Publish versions 0 to 2. Version 0 is published twice, and rank 1 has no space for version 1 at first."""
        first = self.publish()
        compared = [self.compare(first)]
        failures = [self.failure()]
        self.trainer.step(self.samples)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with patch.object(os, "posix_fallocate", side_effect=full) if self.world.rank == 1 else nullcontext():
            failures.append(self.failure())
        kept = [sorted(self.transport.versions)]
        readable = len(list(SharedMemoryTransport("reader").pull(join(first))))
        compared.append(self.compare(self.publish()))
        self.trainer.step(self.samples)
        compared.append(self.compare(self.publish()))
        kept.append(sorted(self.transport.versions))
        dist.barrier()  # no rank releases its shard before all have compared
        self.publisher.close()
        return {
            "num_gathered": self.count_gathered(),
            "compared": compared,
            "failures": failures,
            "kept": kept,
            "num_readable": readable,
        }


def publish_and_export(folder: str, out: Path, **training: Any) -> list[str]:
    """Digests of the freshly loaded model, as pulled by a reader and as exported."""
    rank = Rank(ModelConfig(path=folder), TrainingConfig(row_tokens=64, **training))
    found = dict(SharedMemoryTransport("reader").pull(join(rank.publish())))
    rank.trainer.export_hf(out)
    rank.publisher.close()
    return [digest(found), digest(load_file(out / "model.safetensors"))]


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 digest of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def publish_models(models: list[tuple[str, str]], **training: Any) -> list[dict[str, Any]]:
    """Run `three_versions` for each model (folder, dtype)."""
    settings = TrainingConfig(steps=10, lr=1e-3, row_tokens=64, rows_per_micro_batch=2, **training)
    return [Rank(ModelConfig(path=folder, dtype=dtype), settings).three_versions() for folder, dtype in models]  # pyright: ignore[reportArgumentType]
