"""The learning algorithm of a run: everything between the finished groups of a batch and the loss of their tokens.

    finished group -> filters -> advantages of its siblings          while the group is played and scheduled
    batch of groups -> advantages over the batch -> samples          `Algorithm.samples`, in the controller
    samples -> `Algorithm.score_tokens` -> trainer                   teachers, critics and reward models
    tokens -> loss, correction, KL to a reference model              `Algorithm.objective`, in the trainer

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from titan_rl.rollout.rewards.advantages import AdvantageFn, compare_batch
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.filters import GroupFilter
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.training.settings import CorrectionConfig, TrainingConfig

if TYPE_CHECKING:
    from titan_rl.training.objective import Objective


class Algorithm:
    """Loss, advantages, off-policy correction, filters and reference model of a run.

    A subclass may override `score_tokens`. The trainer makes its objective from the settings alone.

    Args:
        training: Loss, its bounds and average, and the weight of the KL term.
        correction: Treatment of tokens that older weights or a constraint sampled. By default only the clip.
        advantages: Advantage function of each task, by the task's name.
        filters: Reject finished groups, which are then not trained on.
        max_token_age: Largest age, in versions, of a token that is trained. By default there is no limit.

    Example:

        algorithm = Algorithm(TrainingConfig(loss="gspo"), advantages={"sums": standardized})
        samples = await algorithm.samples(batch.groups, version=12)
    """

    def __init__(
        self,
        training: TrainingConfig,
        correction: CorrectionConfig | None = None,
        *,
        advantages: Mapping[str, AdvantageFn] | None = None,
        filters: Sequence[GroupFilter] = (),
        max_token_age: int | None = None,
    ) -> None:
        self.training = training
        self.correction = correction or CorrectionConfig()
        self.advantages = advantages or {}
        self.filters = filters
        self._max_token_age = max_token_age

    async def samples(self, groups: Iterable[RolloutGroup], version: int) -> Sequence[TrainingSample]:
        """Training samples of a batch. Advantages over the whole batch are computed first, in place.

        Args:
            version: Policy version that the batch is trained from.

        Raises:
            RewardError: an advantage failed.
        """
        groups = list(groups)
        for task, advantage in self.advantages.items():
            compare_batch([group for group in groups if group.task == task], advantage)
        oldest = 0 if self._max_token_age is None else version - self._max_token_age
        build = partial(build_samples, oldest_version=oldest, constrained=self.correction.constrained)
        return await self.score_tokens([sample for group in groups for sample in build(group)])

    async def score_tokens(self, samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
        """Hook between batch and step that returns the samples with advantages or loss weights from another model.

        Called again with the same samples if a step is repeated after the trainer died. By default it returns them
        unchanged.
        """
        return samples

    @property
    def uses_reference(self) -> bool:
        """Whether a KL term keeps the policy close to the model that the run began with."""
        return bool(self.training.kl_coef)

    def objective(self, max_context: int) -> Objective:
        """Make the function of a micro-batch's tokens that the trainer minimizes. Imports torch.

        Raises:
            ConfigError: there is no such `training.loss`.
        """
        from titan_rl.training.objective import Objective

        return Objective(self.training, self.correction, max_context=max_context)
