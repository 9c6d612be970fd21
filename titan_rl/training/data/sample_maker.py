"""From a batch of groups to training samples: advantages over the whole batch, then the samples of each group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from titan_rl.rollout.rewards.advantages import AdvantageFn, compare_batch
from titan_rl.rollout.types import RolloutGroup
from titan_rl.training.choices import Constrained
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sample_builder import Distillation, build_samples


class SampleMaker:
    """Makes the samples of a batch. The advantages within each group are there already, see `Rollouter`.

    Args:
        advantages: Advantage function of each task, by the task's name.
        constrained: Treatment of tokens sampled under a constraint; see `build_samples`.
        distillation: Use of the teacher's scores; see `build_samples`.
        max_token_age: Largest age, in versions, of a token that is trained. By default there is no limit.

    Example: `SampleMaker({"sums": batch_mean}).samples(batch.groups, version=12)`
    """

    def __init__(
        self,
        advantages: Mapping[str, AdvantageFn] | None = None,
        *,
        constrained: Constrained = "masked",
        distillation: Distillation | None = None,
        max_token_age: int | None = None,
    ) -> None:
        self._advantages = advantages or {}
        self._constrained: Constrained = constrained
        self._distillation = distillation
        self._max_token_age = max_token_age

    def samples(self, groups: Iterable[RolloutGroup], version: int) -> list[TrainingSample]:
        """Training samples of a batch. Advantages over the whole batch are computed first, in place.

        Args:
            version: Policy version that the batch is trained from.

        Raises:
            RewardError: an advantage failed.
        """
        groups = list(groups)
        for task, advantage in self._advantages.items():
            compare_batch([group for group in groups if group.task == task], advantage)
        oldest = 0 if self._max_token_age is None else version - self._max_token_age
        return [
            sample
            for group in groups
            for sample in build_samples(
                group, oldest_version=oldest, constrained=self._constrained, distillation=self._distillation
            )
        ]
