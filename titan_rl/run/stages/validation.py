"""What the policy earns on held-out samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from titan_rl.config.run import RunConfig
from titan_rl.errors import RewardError, TrainingError
from titan_rl.rollout.group.failures import ErrorCounts
from titan_rl.rollout.task import measured
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.group_metrics import validation_metrics
from titan_rl.run.observability.rollout_log import RolloutLog
from titan_rl.run.stages.rollout_stage import RolloutStage


class Validation:
    """Runs a group for each held-out sample, all at once, beside the training groups in flight.

    Args:
        transcripts: takes what becomes of the groups.
        run_dir: where the metrics of earlier processes are looked up.
        log: called with (step, metrics).
        tell: shows the user a message.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: RolloutStage,
        transcripts: RolloutLog,
        run_dir: RunDirectory,
        *,
        log: Callable[[int, dict[str, float]], None],
        tell: Callable[[str], None],
    ) -> None:
        self._settings = config.validation
        self._sources = config.tasks
        self._max_lost = config.scheduling.max_failed_groups
        self._groups = groups
        self._transcripts = transcripts
        self._run_dir = run_dir
        self._log = log
        self._tell = tell

    @property
    def is_on(self) -> bool:
        return self._settings.num_prompts > 0

    def is_due(self, step: int) -> bool:
        return self._settings.interval > 0 and step % self._settings.interval == 0

    async def run(self, version: int) -> float | None:
        """The mean reward, of the rollouts that have one. None if validation is off.

        Args:
            version: that the generators serve.

        Raises:
            RewardError: a reward failed on all groups, or on `scheduling.max_failed_groups` in a row.
            TrainingError: no rollout has a reward.
        """
        if not self.is_on:
            return None
        tasks_of_run = [source.name for source in self._sources]
        samples = [(task, sample) for task in tasks_of_run for sample in self._groups.validation_samples(task)]
        lost = LostInARow(min(self._max_lost, len(samples)))
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._run_group(version, index, task, sample, lost))
                for index, (task, sample) in enumerate(samples)
            ]
        return self._report(version, [task.result() for task in running])

    async def run_once(self, version: int) -> float | None:
        """As `run`, unless an earlier process of this run has validated the version."""
        reward = self._run_dir.metric(version, "validation/reward_mean")
        return await self.run(version) if reward is None else reward

    async def _run_group(self, version: int, index: int, task: str, sample: Any, lost: LostInARow) -> RolloutGroup:
        group = await self._groups.run_validation_group(task, f"validation-{index}", sample)
        if group.failure is not None:  # told of at once: the validation may fail with it
            self._transcripts.dropped(group, "reward_failed", version, phase="validation")
        lost.count(group)
        return group

    def _report(self, version: int, groups: Sequence[RolloutGroup]) -> float:
        self._transcripts.finished(groups, "validation", version)
        errors = ErrorCounts()
        for group in groups:
            errors.add_group(group)
        metrics = validation_metrics(groups)
        if "validation/reward_mean" not in metrics:
            raise TrainingError(
                f"no validation rollout got a reward: {errors.describe() or 'none was judged'}; "
                f"{self._run_dir.rollouts} and logs/controller.log beside it have more"
            )
        figures = self._measured(groups)
        reward = metrics["validation/reward_mean"]
        self._log(version, metrics | figures)
        told = "".join(f", {name.removeprefix('validation/')} {value:.3f}" for name, value in figures.items())
        left_out = f", without those that failed: {errors.describe()}" if errors.num_errors else ""
        self._tell(f"validation at step {version}: reward {reward:.3f}{told}{left_out}")
        return reward

    def _measured(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """What tasks say of their groups: validation/<name>, or validation/<task>/<name> where there are several."""
        figures: dict[str, float] = {}
        for source in self._sources:
            judged = [group for group in groups if group.task == source.name and group.failure is None]
            prefix = "validation" if len(self._sources) == 1 else f"validation/{source.name}"
            figures |= {f"{prefix}/{name}": value for name, value in measured(source.task, judged).items()}
        return figures


class LostInARow:
    """Counts held-out groups whose reward failed, with none in between that was judged."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def count(self, group: RolloutGroup) -> None:
        """
        Raises:
            RewardError: they are as many as may be.
        """
        self._count = 0 if group.failure is None else self._count + 1
        if group.failure is not None and self._count == self._most:
            raise RewardError(f"{self._count} held-out groups in a row were lost to rewards that fail: {group.failure}")
