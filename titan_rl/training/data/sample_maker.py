"""Training samples of a batch of groups: first the advantages over the whole batch, then the samples of each group."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from titan_rl.core.errors import RewardError
from titan_rl.rollout.rewards.advantages import AdvantageFn, RunningAdvantage, compare_batch
from titan_rl.rollout.types import RolloutGroup
from titan_rl.training.choices import Constrained
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sample_builder import Distillation, RewardPlacement, build_samples


class SampleMaker:
    """Makes the samples of a batch. The advantages within each group have been computed before; see `Rollouter`.

    Args:
        advantages: Advantage function of each task, by the task's name.
        constrained: Treatment of tokens sampled under a constraint; see `build_samples`.
        distillation: Use of the teacher's scores; see `build_samples`.
        episodes: Placement of the rewards of each task, by its name, if a critic computes advantages from them; see
            `build_samples`.
        max_token_age: Largest age of a trained token, in versions. By default, there is no limit.
        state: Result of an earlier call of `state`. By default, the run begins.

    Example: `SampleMaker({"sums": batch_mean}).samples(batch.groups, version=12)`
    """

    def __init__(
        self,
        advantages: Mapping[str, AdvantageFn] | None = None,
        *,
        constrained: Constrained = "masked",
        distillation: Distillation | None = None,
        episodes: Mapping[str, RewardPlacement] | None = None,
        max_token_age: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._advantages = advantages or {}
        self._constrained: Constrained = constrained
        self._distillation = distillation
        self._episodes = episodes or {}
        self._max_token_age = max_token_age
        self._states: dict[str, dict[str, Any]] = _json_copy(state or {})  # state of running advantages, by task

    def state(self) -> dict[str, Any]:
        """State of the advantages that depend on earlier batches, by task, as JSON values.

        Raises:
            RewardError: The state of an advantage cannot be written as JSON.
        """
        return _json_copy(self._states)

    def samples(self, groups: Iterable[RolloutGroup], version: int) -> list[TrainingSample]:
        """Training samples of a batch. Advantages over the whole batch are computed first, in place.

        Args:
            version: Policy version that the batch is trained from.

        Raises:
            RewardError: An advantage failed.
        """
        groups = list(groups)
        for task, advantage in self._advantages.items():
            state = self._states.setdefault(task, {}) if isinstance(advantage, RunningAdvantage) else None
            compare_batch([group for group in groups if group.task == task], advantage, state)
        oldest = 0 if self._max_token_age is None else version - self._max_token_age
        return [
            sample
            for group in groups
            for sample in build_samples(
                group,
                oldest_version=oldest,
                constrained=self._constrained,
                distillation=self._distillation,
                episodes=self._episodes.get(group.task),
            )
        ]


def _json_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RewardError(f"the state of an advantage, {state!r}, cannot be written as JSON: {error}") from error
