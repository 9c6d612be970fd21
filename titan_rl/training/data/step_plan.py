"""Which rank trains which rows of a batch, in which order. The controller plans, ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan_rl.training.data.family import Family, find_families
from titan_rl.training.data.packer import pack
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.settings import TrainingConfig

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


def plan_step(samples: Sequence[TrainingSample], training: TrainingConfig) -> list[StepPlan]:
    """Split samples into minibatches, siblings together and groups in order; pack each, and deal its rows to ranks.

    There are fewer minibatches where there are fewer groups.

    Returns:
        one plan for each of the `training.data_parallel` ranks. A sample is in one of them or dropped.
    """
    groups = list(dict.fromkeys(sample.group_id for sample in samples))
    count = max(1, min(training.minibatches, len(groups)))
    part_of = {group: index * count // len(groups) for index, group in enumerate(groups)}
    parts: list[list[TrainingSample]] = [[] for _ in range(count)]
    for sample in samples:
        parts[part_of[sample.group_id]].append(sample)
    plans: list[StepPlan] = [[] for _ in range(training.data_parallel)]
    for part in parts:
        for plan, minibatch in zip(plans, _deal(part, training), strict=True):
            plan.append(minibatch)
    return plans


def _deal(samples: Sequence[TrainingSample], training: TrainingConfig) -> list[MinibatchPlan]:
    """The rows of each micro-batch are neighbours in the packing, so that they are of similar length."""
    ranks = training.data_parallel
    families = (
        find_families(samples, training.row_tokens)
        if training.share_prompts
        else [Family((sample,)) for sample in samples]
    )
    packing = pack(families, training.row_tokens, multiple_of=ranks)
    at_once = ranks * training.rows_per_micro_batch
    micro_batches: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for start in range(0, len(packing.rows), at_once):
        rows = packing.rows[start : start + at_once]
        for rank in range(ranks):
            micro_batches[rank].append(rows[rank::ranks])
    return [MinibatchPlan(own, len(samples), len(packing.dropped)) for own in micro_batches]
