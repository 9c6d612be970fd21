"""A trainer whose every version can be published, with the means to verify what was pulled."""

from __future__ import annotations

from collections import deque

from titan_rl.config.sections import ModelConfig, StateDictConfig
from titan_rl.statedict.probes import make_probes
from titan_rl.statedict.types import Manifest, StateDictTransport
from titan_rl.training.trainer import TrainerCore

PROBE_TOKENS = 32
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}


class WeightPublisher:
    """Publishes the trainer's weights, each version with the trainer's own logprobs of the probe sequences.

    The two newest versions stay available: a generator may still be reading the one before.

    Args:
        transport: of the first rank. The others hand it their parts, and have none.
    """

    def __init__(
        self,
        trainer: TrainerCore,
        transport: StateDictTransport | None,
        *,
        model: ModelConfig,
        statedict: StateDictConfig,
        seed: int,
    ) -> None:
        self._trainer = trainer
        self._transport = transport
        self._tolerance = statedict.tolerance or TOLERANCE[model.dtype]
        length = min(PROBE_TOKENS, model.max_context - 1)  # a reader may have to add a token to score them
        self._probe_sequences = trainer.draw(statedict.num_probes, length, seed)

    def publish(self) -> Manifest | None:
        """Publish the current version. All ranks call this at the same time; the first one gets the manifest.

        Raises:
            StateDictError: it is published already, or there is no room for it.
        """
        version = self._trainer.version
        probes = make_probes(self._trainer.score, self._probe_sequences)
        tensors = self._trainer.named_tensors()
        if self._transport is None:
            deque(tensors, maxlen=0)
            return None
        manifest = self._transport.publish(version, tensors, probes=probes, tolerance=self._tolerance)
        self._transport.release(version - 2)
        return manifest

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
