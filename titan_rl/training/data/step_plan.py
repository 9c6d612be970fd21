"""Which rank trains which rows of a batch, in which order. The controller plans, ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan_rl.training.data.family import Family, find_families
from titan_rl.training.data.packer import pack
from titan_rl.training.data.sample import TrainingSample

MicroBatch = list[list[Family]]
"""Rows of families that one forward and backward pass takes; empty where a rank only accompanies the others."""


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """One optimizer step as one rank sees it. All ranks have as many micro-batches."""

    micro_batches: list[MicroBatch]
    num_samples: int  # of all ranks
    num_dropped: int  # of all ranks; longer than a row


StepPlan = list[MinibatchPlan]
"""What one rank does in a step."""


def plan_step(
    samples: Sequence[TrainingSample],
    *,
    row_tokens: int,
    rows_per_micro_batch: int,
    minibatches: int,
    ranks: int,
    share_prompts: bool,
) -> list[StepPlan]:
    """Split samples into minibatches, siblings together and groups in order; pack each, and deal its rows to ranks.

    There are fewer minibatches where there are fewer groups.

    Args:
        row_tokens: in one packed row.
        rows_per_micro_batch: of each rank.
        ranks: that have rows of their own.
        share_prompts: what siblings have in common is in a row once.

    Returns:
        one plan for each of the ranks. A sample is in one of them or dropped.
    """
    groups = list(dict.fromkeys(sample.group_id for sample in samples))
    count = max(1, min(minibatches, len(groups)))
    part_of = {group: index * count // len(groups) for index, group in enumerate(groups)}
    parts: list[list[TrainingSample]] = [[] for _ in range(count)]
    for sample in samples:
        parts[part_of[sample.group_id]].append(sample)
    plans: list[StepPlan] = [[] for _ in range(ranks)]
    for part in parts:
        families = find_families(part, row_tokens) if share_prompts else [Family((sample,)) for sample in part]
        packing = pack(families, row_tokens, multiple_of=ranks)
        dealt = _deal(packing.rows, ranks, rows_per_micro_batch)
        for plan, micro_batches in zip(plans, dealt, strict=True):
            plan.append(MinibatchPlan(micro_batches, len(part), len(packing.dropped)))
    return plans


def _deal(rows: Sequence[list[Family]], ranks: int, rows_per_micro_batch: int) -> list[list[MicroBatch]]:
    """Each rank's micro-batches. The rows of one are neighbours in the packing, so that they are of similar length."""
    at_once = ranks * rows_per_micro_batch
    starts = range(0, len(rows), at_once)
    return [[list(rows[start + rank : start + at_once : ranks]) for start in starts] for rank in range(ranks)]
