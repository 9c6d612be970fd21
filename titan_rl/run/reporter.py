"""What a run says of its steps and validations: metrics, transcripts, lines on the screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from titan_rl.errors import TrainingError
from titan_rl.rollout.group.failures import ErrorCounts
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.observability.metrics import group_metrics, validation_metrics
from titan_rl.run.observability.progress import Progress, StepReport
from titan_rl.run.observability.rollout_log import RolloutLog
from titan_rl.scheduling.batch import GroupBatch


class RunReporter:
    """
    Args:
        log: called with (step, metrics) for every record.
        folder: of the run, for the messages.
    """

    def __init__(
        self, log: Callable[[int, dict[str, float]], None], progress: Progress, rollouts: RolloutLog, folder: Path
    ) -> None:
        self._log = log
        self._progress = progress
        self._rollouts = rollouts
        self._folder = folder

    def step(self, step: int, batch: GroupBatch, metrics: Mapping[str, float]) -> None:
        """A step that was trained.

        Args:
            metrics: of its training and its time, `time/step_s` among them.
        """
        metrics = group_metrics(batch.groups) | dict(metrics)
        metrics["throughput/tokens_per_s"] = batch.num_tokens / metrics["time/step_s"]
        self._rollouts.finished(batch.groups, "train", step)
        self._log(step, metrics | self._rollouts.figures())
        trained = metrics["rollout/reward_mean"]
        self._progress.step(
            StepReport(
                step=step,
                reward=metrics.get("rollout/finished_reward_mean", trained),
                reward_trained=trained,
                tokens_per_second=metrics["throughput/tokens_per_s"],
                staleness=metrics["train/staleness_mean"],
                seconds=metrics["time/step_s"],
            )
        )

    def validation_lost(self, step: int, group: RolloutGroup) -> None:
        """A held-out group whose reward failed; the validation may fail with it."""
        self._rollouts.dropped(group, "reward_failed", step, phase="validation")

    def validation(self, step: int, groups: Sequence[RolloutGroup]) -> float:
        """The mean reward of held-out groups, of the rollouts that have one.

        Raises:
            TrainingError: none has.
        """
        self._rollouts.finished(groups, "validation", step)
        errors = ErrorCounts()
        for group in groups:
            errors.add_group(group)
        metrics = validation_metrics(groups)
        if "validation/reward_mean" not in metrics:
            raise TrainingError(
                f"no validation rollout got a reward: {errors.describe() or 'none was judged'}; "
                f"{self._folder / 'rollouts.jsonl'} and logs/controller.log beside it have more"
            )
        reward = metrics["validation/reward_mean"]
        self._log(step, metrics)
        left_out = f", without those that failed: {errors.describe()}" if errors.num_errors else ""
        self._progress.message(f"validation at step {step}: reward {reward:.3f}{left_out}")
        return reward
