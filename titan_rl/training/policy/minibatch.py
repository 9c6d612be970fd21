"""One rank's share of an optimizer step, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_rl.training.attention.attention import layout_documents
from titan_rl.training.data.family import Family
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.step_plan import MinibatchPlan
from titan_rl.training.parallel.world import World
from titan_rl.training.policy.tensor_batch import LayOut, TensorBatch, make_tensor_batch

PLACEHOLDER = Family((TrainingSample("", "", [0, 0], [False, False], [0.0, 0.0], [0.0, 0.0], [-1, -1], 1.0),))
"""What a rank without rows passes through the model, since all ranks meet in every layer."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step is computed from on this rank."""

    batches: list[TensorBatch]
    rollout_ids: list[str]  # of this rank's samples, also those that have no token to train on
    num_samples: int  # of all ranks
    num_dropped: int  # of all ranks; longer than a row
    num_padding: int
    num_positions: int

    @staticmethod
    def from_plan(
        plan: MinibatchPlan, device: torch.device, *, alone: bool, lay_out: LayOut = layout_documents
    ) -> Minibatch:
        """Lay the rows out.

        Args:
            alone: no other rank waits for this one, so micro-batches without a trained token are left out.
            lay_out: as for `make_tensor_batch`.
        """
        batches = [make_tensor_batch(rows or [[PLACEHOLDER]], device, lay_out) for rows in plan.micro_batches]
        idle = [not rows for rows in plan.micro_batches]
        ids = (each for batch, without in zip(batches, idle, strict=True) if not without for each in batch.rollout_ids)
        return Minibatch(
            batches=[batch for batch in batches if batch.num_trained or not alone],
            rollout_ids=list(dict.fromkeys(ids)),
            num_samples=plan.num_samples,
            num_dropped=plan.num_dropped,
            num_padding=sum(
                batch.token_ids_BL.numel() if without else batch.num_padding
                for batch, without in zip(batches, idle, strict=True)
            ),
            num_positions=sum(batch.token_ids_BL.numel() for batch in batches),
        )


def packing_metrics(minibatches: Sequence[Minibatch], world: World) -> dict[str, float]:
    """Samples and padding of minibatches, over all ranks: num_samples trained, num_dropped_samples, which are longer
    than a row, and padding_fraction, the share of positions that hold no sample."""
    num_samples = sum(minibatch.num_samples for minibatch in minibatches)
    num_dropped = sum(minibatch.num_dropped for minibatch in minibatches)
    num_padding, num_positions = world.sum(
        [
            sum(minibatch.num_padding for minibatch in minibatches),
            sum(minibatch.num_positions for minibatch in minibatches),
        ]
    )
    return {
        "num_samples": float(num_samples - num_dropped),
        "num_dropped_samples": float(num_dropped),
        "padding_fraction": num_padding / num_positions if num_positions else 0.0,
    }
