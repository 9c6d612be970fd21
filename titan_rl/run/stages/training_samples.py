"""What a step is trained on, of the groups of its batch."""

from __future__ import annotations

from titan_rl.config.run import RunConfig
from titan_rl.rollout.rewards.advantages import subtract_batch_mean
from titan_rl.scheduling.batches.batch import GroupBatch
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sample_builder import build_samples


def training_samples(config: RunConfig, batch: GroupBatch) -> list[TrainingSample]:
    """Token rows of all rollouts. Advantages that compare with the whole batch are made here, and noted in it."""
    for source in config.tasks:
        if config.advantage_of(source) == "batch_mean":
            subtract_batch_mean([group for group in batch.groups if group.task == source.name])
    max_age = config.scheduling.max_token_age
    oldest = 0 if max_age is None else batch.version - max_age
    constrained = config.correction.constrained
    return [
        sample
        for group in batch.groups
        for sample in build_samples(group, oldest_version=oldest, constrained=constrained)
    ]
