"""A trainer whose every version can be published, with the means to verify what was pulled."""

from __future__ import annotations

from collections.abc import Sequence

from titan_rl.config.sections import ModelConfig, StateDictConfig
from titan_rl.statedict.probes import make_probes
from titan_rl.statedict.types import Manifest, StateDictTransport
from titan_rl.training.trainer import TrainerCore

PROBE_TOKENS = 32
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}


class WeightPublisher:
    """Publishes the trainer's weights, each version with the trainer's own logprobs of the probe sequences.

    The two newest versions stay available: a generator may still be reading the one before.
    """

    def __init__(
        self,
        trainer: TrainerCore,
        transport: StateDictTransport,
        *,
        model: ModelConfig,
        statedict: StateDictConfig,
        vocab_size: int,
        seed: int,
    ) -> None:
        self._trainer = trainer
        self._transport = transport
        self._num_probes = statedict.num_probes
        self._tolerance = statedict.tolerance or TOLERANCE[model.dtype]
        self._probe_tokens = min(PROBE_TOKENS, model.max_context)
        self._vocab_size = vocab_size
        self._seed = seed

    def publish(self) -> Manifest:
        version = self._trainer.version
        probes = make_probes(
            self._trainer.score,
            vocab_size=self._vocab_size,
            num_probes=self._num_probes,
            length=self._probe_tokens,
            seed=self._seed,
        )
        manifest = self._transport.publish(
            version, self._trainer.named_tensors(), probes=probes, tolerance=self._tolerance
        )
        self._transport.release(version - 2)
        return manifest

    def close(self) -> None:
        self._transport.close()
