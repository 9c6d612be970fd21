"""A trainer whose every version can be published, with the means to verify what was pulled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from titan_rl.config.sections import ModelConfig, StateDictConfig
from titan_rl.errors import StateDictError
from titan_rl.statedict.probes import make_probes
from titan_rl.statedict.types import Manifest, Probe, StateDictTransport, TensorSlice
from titan_rl.training.trainer import TrainerCore

PROBE_TOKENS = 32
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What a rank publishes of a version. The slices share the trainer's memory."""

    version: int
    slices: list[tuple[str, TensorSlice]]
    probes: tuple[Probe, ...]


class WeightPublisher:
    """Publishes the weights that this rank holds; the first one adds the trainer's own logprobs of the probe sequences.

    The two newest versions stay available: a generator may still be reading the one before.

    Args:
        transport: of this rank alone.
    """

    def __init__(
        self,
        trainer: TrainerCore,
        transport: StateDictTransport,
        *,
        model: ModelConfig,
        statedict: StateDictConfig,
        seed: int,
    ) -> None:
        self._trainer = trainer
        self._transport = transport
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._tolerance = statedict.tolerance or TOLERANCE[model.dtype]
        length = min(PROBE_TOKENS, model.max_context - 1)  # a reader may have to add a token to score them
        self._probe_sequences = trainer.draw(statedict.num_probes, length, seed)

    def publish(self) -> Manifest:
        """Publish this rank's part of the current version. All ranks call this at the same time; all succeed or none.

        Returns:
            a manifest of one part. `titan_rl.statedict.parts.join` makes a version of those of all ranks.

        Raises:
            StateDictError: on all ranks, if one of them has published the version already, has no room for it, or
                cannot write it. None keeps what it has written of it; older versions stay.
        """
        return self._settle(self._write(self._collect()))

    def close(self) -> None:
        self._transport.close()

    def _collect(self) -> _Snapshot:
        """What takes all ranks: scoring the probes, and gathering what cannot be published in slices."""
        probes = make_probes(self._trainer.score, self._probe_sequences)
        return _Snapshot(
            self._trainer.version, self._trainer.held_slices(), probes if self._trainer.world.is_first else ()
        )

    def _write(self, snapshot: _Snapshot) -> Manifest | Exception:
        """Copy this rank's slices. Waits for no other rank, so that it may run in any thread as long as the weights
        stand still; what fails is for `_settle` to raise."""
        try:
            return self._transport.publish(
                snapshot.version, self._converted(snapshot), probes=snapshot.probes, tolerance=self._tolerance
            )
        except Exception as error:
            return error

    def _settle(self, written: Manifest | Exception) -> Manifest:
        """Tell the other ranks, and hear of them. A version that one of them lacks is nobody's."""
        world = self._trainer.world
        problem = None
        if isinstance(written, Exception):
            problem = str(written) if isinstance(written, StateDictError) else repr(written)
        try:
            world.agree(problem and f"trainer rank {world.rank}: {problem}", StateDictError)
        except StateDictError as error:
            if isinstance(written, Exception):
                raise error from written
            self._transport.release(written.version)
            raise
        assert isinstance(written, Manifest)
        self._transport.release(written.version - 2)
        return written

    def _converted(self, snapshot: _Snapshot) -> Iterator[tuple[str, TensorSlice]]:
        for name, piece in snapshot.slices:
            yield name, TensorSlice(piece.tensor.to(self._dtype), piece.place)
