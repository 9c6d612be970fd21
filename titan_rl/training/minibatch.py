"""The samples of one optimizer step, as micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_rl.training.batch import Batch, make_batch
from titan_rl.training.packer import pack
from titan_rl.training.sample import TrainingSample


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step is computed from."""

    batches: list[Batch]  # those with a token to train on
    num_samples: int
    num_dropped: int  # longer than a row
    num_padding: int
    num_positions: int


def lay_out(
    samples: Sequence[TrainingSample],
    num_minibatches: int,
    row_tokens: int,
    rows_per_micro_batch: int,
    device: torch.device,
) -> list[Minibatch]:
    """Split samples into minibatches, siblings together and groups in order, and pack each.

    There are fewer minibatches where there are fewer groups.
    """
    groups = list(dict.fromkeys(sample.group_id for sample in samples))
    count = max(1, min(num_minibatches, len(groups)))
    part_of = {group: index * count // len(groups) for index, group in enumerate(groups)}
    parts: list[list[TrainingSample]] = [[] for _ in range(count)]
    for sample in samples:
        parts[part_of[sample.group_id]].append(sample)
    return [_lay_out(part, row_tokens, rows_per_micro_batch, device) for part in parts]


def _lay_out(
    samples: Sequence[TrainingSample], row_tokens: int, rows_per_micro_batch: int, device: torch.device
) -> Minibatch:
    packing = pack(samples, row_tokens)
    batches = [
        make_batch(packing.rows[start : start + rows_per_micro_batch], device)
        for start in range(0, len(packing.rows), rows_per_micro_batch)
    ]
    return Minibatch(
        batches=[batch for batch in batches if batch.num_trained],
        num_samples=len(samples),
        num_dropped=len(packing.dropped),
        num_padding=sum(batch.num_padding for batch in batches),
        num_positions=sum(batch.token_ids_BL.numel() for batch in batches),
    )
