"""Metrics and reports of training steps: the time in each stage, transcripts, and a line on the screen."""

from __future__ import annotations

import logging
import math
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from statistics import fmean, pstdev
from types import MappingProxyType
from typing import Any

from titan_rl.core.clusters import clustered_error, influences
from titan_rl.core.tracing.spans import Track
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.metrics.table import METRICS
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.run.observability.progress import Progress, ShownStep
from titan_rl.run.observability.rollout_log import DroppedGroups, RolloutLog
from titan_rl.scheduling.batches import GroupBatch
from titan_rl.training.data.sample_builder import count_branches
from titan_rl.viewer.warning_signs import WarningSigns

COSTS = ("seconds", "own_seconds", "env_seconds", "reward_seconds", "teacher_seconds", "retries", "close_failed")
"""Metrics of rollouts that measure the cost of running them, which faults have as well."""


def group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Compute the metrics of a step's rollouts: the policy's rewards, and the faults of environments.

    Means leave out rollouts that were lost to a fault or aborted (`RolloutGroup.counted`), regardless of their reward.
    Metrics of rewards are absent if no rollout was scored, and all metrics if there is no rollout.

    Example: two groups of two, with rewards (0, 1) and (1, 1), give among others

        {"rollout/num_groups": 2.0, "rollout/reward_mean": 0.75, "rollout/reward_std": 0.433,
         "rollout/zero_variance_groups": 0.5, "rollout/status/completed": 1.0, "rollout/turns_mean": 1.0}

    Returns:
        rollout/num_groups, rollout/num_rollouts: numbers of groups and rollouts.
        rollout/fault_fraction: share of rollouts that were lost to a fault (`RolloutGroup.num_faults`).
        rollout/reward_mean, reward_std (population), reward_min, reward_max: rewards of all scored rollouts.
        rollout/reward/<name>: mean of one reward of the breakdown over the rollouts that have it.
        rollout/zero_variance_groups: share of the scored groups whose rewards, or those of each seat, are all equal, so
        that nothing is learned from them. Absent in groups of one rollout.
        rollout/seat/<seat>/reward_mean: mean reward of one seat, in environments with several seats.
        rollout/status/<status>: share of all rollouts with this status.
        rollout/completion_tokens_mean, completion_tokens_max: completion tokens per rollout, over all turns.
        rollout/turns_mean: mean number of turns.
        rollout/branches_per_rollout: mean number of samples of a rollout, which is 1 as long as each prompt extends the
        previous prompt and its completion.
        rollout/constrained_fraction: share of the completion tokens that were sampled under a constraint.
        rollout/constraint_weight_mean: mean over rollouts with such tokens of the probability that the policy gives to
        the allowed tokens. Both are absent if no token was constrained.
        rollout/metrics/<name>: mean of a metric of the rollouts; of `COSTS`, over all rollouts.
        completion/<name>: mean of a metric of the completions.
        rollout/values_left_out: number of rewards and metrics that are not finite numbers, which no mean includes.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    counted = [rollout for group in groups for rollout in group.counted]
    metrics = {
        "rollout/num_groups": float(len(groups)),
        "rollout/num_rollouts": float(len(rollouts)),
        "rollout/fault_fraction": _fault_fraction(groups),
    }
    if tokens := [rollout.num_completion_tokens for rollout in counted]:
        metrics["rollout/completion_tokens_mean"] = fmean(tokens)
        metrics["rollout/completion_tokens_max"] = float(max(tokens))
        metrics["rollout/turns_mean"] = fmean(len(rollout.turns) for rollout in counted)
    if branches := [count_branches(rollout) for rollout in counted if rollout.turns]:
        metrics["rollout/branches_per_rollout"] = fmean(branches)
    metrics |= _of_constraints(counted)
    for status in RolloutStatus:
        metrics[f"rollout/status/{status}"] = fmean(rollout.status is status for rollout in rollouts)

    num_given = sum(rollout.reward is not None for rollout in counted)
    scored = [seats for group in groups if (seats := _rewards_by_seat(group))]
    flat = [reward for seats in scored for rewards in seats.values() for reward in rewards]
    left_out = num_given - len(flat)
    if scored:
        metrics["rollout/reward_mean"] = fmean(flat)
        metrics["rollout/reward_std"] = pstdev(flat)
        metrics["rollout/reward_min"] = min(flat)
        metrics["rollout/reward_max"] = max(flat)
        compared = [seats for seats in scored if any(len(rewards) > 1 for rewards in seats.values())]
        if compared:
            metrics["rollout/zero_variance_groups"] = fmean(
                all(min(rewards) == max(rewards) for rewards in seats.values()) for seats in compared
            )
        for seat in sorted({seat for seats in scored for seat in seats if seat is not None}):
            metrics[f"rollout/seat/{seat}/reward_mean"] = fmean(
                reward for seats in scored for reward in seats.get(seat, ())
            )

    completions = [turn.completion for rollout in rollouts for turn in rollout.turns]
    kept = set(map(id, counted))
    lost = [rollout.metrics for rollout in rollouts if id(rollout) not in kept]
    costs = [{name: each[name] for name in COSTS if name in each} for each in lost]
    for prefix, records in {
        "rollout/reward/": [rollout.reward_breakdown for rollout in counted],
        "rollout/metrics/": [*(rollout.metrics for rollout in counted), *costs],
        "completion/": [completion.metrics for completion in completions],
    }.items():
        for name in sorted({name for record in records for name in record}):
            values = [record[name] for record in records if name in record]
            numbers = [number for value in values if (number := finite(value)) is not None]
            left_out += len(values) - len(numbers)
            if numbers:
                metrics[f"{prefix}{name}"] = fmean(numbers)
    metrics["rollout/values_left_out"] = float(left_out)
    return metrics


def _fault_fraction(groups: Sequence[RolloutGroup]) -> float:
    return sum(group.num_faults for group in groups) / sum(len(group.rollouts) for group in groups)


def _of_constraints(rollouts: Sequence[Rollout]) -> dict[str, float]:
    allowed = [
        [value for turn in rollout.turns for value in turn.completion.allowed_logprobs or () if value < 0]
        for rollout in rollouts
    ]
    constrained = [values for values in allowed if values]
    if not constrained:
        return {}
    num_tokens = sum(rollout.num_completion_tokens for rollout in rollouts)
    return {
        "rollout/constrained_fraction": sum(map(len, constrained)) / num_tokens,
        "rollout/constraint_weight_mean": fmean(math.exp(sum(values)) for values in constrained),
    }


def validation_metrics(
    groups: Sequence[RolloutGroup], prefix: str = "validation", ids: Sequence[str] = ()
) -> dict[str, float]:
    """Compute `group_metrics` of held-out groups, with the prefix in their names.

    The mean reward is that of the scored rollouts of all seats; `<prefix>/unscored` is the number of other rollouts.
    `<prefix>/distinct_prompts` is the number of distinct prompts, and `<prefix>/reward_error` the standard error of the
    mean reward, clustered by distinct prompt; absent if there are fewer than two.

    Args:
        ids: Identities of the groups' prompts, equal for prompts that are the same. By default all are distinct.
    """
    metrics = {f"{prefix}/{name.removeprefix('rollout/')}": value for name, value in group_metrics(groups).items()}
    scored = sum(rollout.reward is not None for group in groups for rollout in group.counted)
    metrics[f"{prefix}/unscored"] = float(sum(len(group.rollouts) for group in groups) - scored)
    metrics[f"{prefix}/distinct_prompts"] = float(len(set(ids) or groups))
    rewards = [[reward for seat in _rewards_by_seat(group).values() for reward in seat] for group in groups]
    error = clustered_error(influences(dict(enumerate(rewards))), dict(enumerate(ids)))
    return metrics if error is None else metrics | {f"{prefix}/reward_error": error}


def _rewards_by_seat(group: RolloutGroup) -> dict[str | None, list[float]]:
    """Rewards by seat; seats without rewards are left out."""
    seats: defaultdict[str | None, list[float]] = defaultdict(list)
    for rollout in group.counted:
        if (value := finite(rollout.reward)) is not None:
            seats[rollout.seat].append(value)
    return seats


def finite(value: Any) -> float | None:
    """Convert a number, which may be of NumPy or torch, to a float. Return None if the value is not a finite number."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


class Stage(Enum):
    """Stage of the loop: its name, its part of the run, whether the trainer is idle in it, and the metric of its
    time."""

    BATCH = ("waiting for a batch", "scheduler", True, "time/wait_for_rollouts_s")
    SAMPLES = ("building samples", "trainer", False, "time/samples_s")
    TRAIN = ("train step", "trainer", False, "time/train_s")
    WAIT_FOR_PULL = ("waiting for the pull before", "sync", True, "sync/wait_for_pull_s")
    PUBLISH = ("begin to publish", "sync", False, "sync/begin_publish_s")
    VALIDATION = ("validation", "validation", False, "time/validation_s")
    CHECKPOINT = ("checkpoint", "checkpoint", False, "time/checkpoint_s")

    def __init__(self, called: str, kind: str, is_idle: bool, metric: str) -> None:
        self.called = called
        self.kind = kind
        self.is_idle = is_idle
        self.metric = metric


STEP = (Stage.BATCH, Stage.SAMPLES, Stage.TRAIN, Stage.WAIT_FOR_PULL, Stage.PUBLISH)
"""Stages of a step."""


class LoopStages:
    """Tracker of the stage of the loop, which is in one stage at a time."""

    def __init__(self) -> None:
        self._track = Track("steps", "trainer")
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, stage: Stage, step: int) -> None:
        """Enter a stage of a step."""
        self._track.enter(stage.called, kind=stage.kind, idle=stage.is_idle, step=step)

    def metrics(self) -> dict[str, float]:
        """Seconds in each stage since `begin_step`, by the metrics' full names, including `time/step_s`."""
        for called, seconds in self._track.take().items():
            self._seconds[called] += seconds
        times = {stage.metric: self._seconds[stage.called] for stage in Stage}
        return times | {"time/step_s": sum(times[stage.metric] for stage in STEP)}

    def begin_step(self) -> None:
        """Begin to count times for the next step."""
        self._track.take()
        self._seconds.clear()

    def close(self) -> None:
        self._track.close()


logger = logging.getLogger(__name__)


class StepReports:
    """Collects the metrics of each step from the end of its training until it is reported.

    Args:
        sinks: Sink for the metrics.
        tasks: Names of the tasks, if the run has several.
    """

    def __init__(
        self,
        sinks: MetricSink,
        progress: Progress,
        transcripts: RolloutLog,
        tasks: Sequence[str] = (),
    ) -> None:
        self._sinks = sinks
        self._progress = progress
        self._transcripts = transcripts
        self._tasks = tasks
        self._warning_signs = WarningSigns()
        # by step that is not yet reported: its batch, its metrics, and the reasons why rollouts were skipped
        self._trained: dict[int, tuple[GroupBatch, dict[str, float], Mapping[str, str]]] = {}

    def trained(
        self,
        step: int,
        batch: GroupBatch,
        dropped: DroppedGroups,
        metrics: Mapping[str, float],
        skipped: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Add a step that was trained on a batch.

        Args:
            dropped: Groups that were dropped in favor of those of the batch.
            metrics: Metrics of the trainer.
            skipped: Reasons why rollouts of the batch were skipped, by their ids.
        """
        scheduling = prefixed("scheduling", batch.metrics) | finished_figures(batch.groups, dropped.finished)
        of_tasks = [prefixed(f"task/{task}", task_metrics(task, batch.groups, dropped)) for task in self._tasks]
        self._trained[step] = batch, prefixed("train", metrics) | scheduling | dict(ChainMap(*of_tasks)), skipped

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics, by their full names, to a step that is not yet reported. One call must add `time/step_s`."""
        self._trained[step][1].update(metrics)

    @property
    def unreported(self) -> list[int]:
        """Steps that are not yet reported, ascending."""
        return sorted(self._trained)

    def report(self, step: int) -> None:
        """Write and show the metrics of a step, once."""
        batch, metrics, skipped = self._trained.pop(step)
        metrics = group_metrics(batch.groups) | metrics
        metrics["throughput/tokens_per_s"] = batch.num_tokens / metrics["time/step_s"]
        self._transcripts.finished(batch.groups, "train", step, trained_at=batch.version, skipped=skipped)
        self._sinks.log(step, metrics | self._transcripts.figures())
        self._warn(step, metrics)
        self._progress.step(shown_step(step, metrics))

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a validation."""
        self._sinks.log(step, metrics)
        self._warn(step, metrics)

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Compare later steps with earlier ones of a resumed run.

        Args:
            records: Lines of `metrics.jsonl`.
        """
        for record in records:
            self._warning_signs.look(record)

    def _warn(self, step: int, metrics: Mapping[str, float]) -> None:
        for warning in self._warning_signs.look({"step": step, **metrics}):
            logger.warning("step %d: %s", step, warning)
            self._progress.warning(f"warning: {warning}")


_REPORTED_ERRORS = 0.05  # share of the rollouts


def shown_step(step: int, metrics: Mapping[str, float]) -> ShownStep:
    """Choose the metrics of a step that the display shows: the mean reward of trained and dropped rollouts, the speed,
    and the staleness, if the trainer reports it. The reward of the trained rollouts is noted if it differs, and so is a
    large share of errors."""
    trained = metrics["rollout/reward_mean"]
    reward = metrics.get("rollout/finished_reward_mean", trained)
    errors = metrics["rollout/finished_errors"] / metrics["rollout/finished_rollouts"]
    faults = metrics.get("rollout/finished_fault_fraction", 0.0)
    notes = [f"trained on {trained:.3f}"] if abs(reward - trained) >= 0.0005 else []
    notes += [f"{errors:.0%} ended in an error"] if errors >= _REPORTED_ERRORS else []
    notes += [f"{faults:.0%} left out as faults"] if faults >= _REPORTED_ERRORS else []
    figures = {"tokens/s": f"{metrics['throughput/tokens_per_s']:6.0f}"}
    if (staleness := metrics.get("train/staleness_mean")) is not None:
        figures["staleness"] = f"{staleness:.1f}"
    curve = "reward", reward, f" ({'; '.join(notes)})" if notes else ""
    return ShownStep(step, metrics["time/step_s"], curve, figures)


def finished_figures(trained: Sequence[RolloutGroup], dropped: Sequence[RolloutGroup]) -> dict[str, float]:
    """Compute the metrics of finished groups before filtering, which show the policy's rewards: a mean over trained
    groups has only what the filters leave. Each group counts once, in the step that trains it or in whose favor it was
    dropped.

    Returns:
        rollout/finished_groups and rollout/finished_rollouts, their numbers; rollout/finished_reward_mean, the mean
        over all rollouts with a reward that were not lost to a fault, absent if there is none; rollout/finished_errors,
        the number of rollouts that ended in an error, including those of the policy; rollout/finished_fault_fraction,
        the share of rollouts that were lost to a fault, absent if there is no rollout.
    """
    groups = [*trained, *dropped]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for seat in _rewards_by_seat(group).values() for reward in seat]
    figures = {
        "rollout/finished_groups": float(len(groups)),
        "rollout/finished_rollouts": float(len(rollouts)),
        "rollout/finished_errors": float(sum(rollout.status.is_error for rollout in rollouts)),
    }
    if rollouts:
        figures["rollout/finished_fault_fraction"] = _fault_fraction(groups)
    return figures | ({"rollout/finished_reward_mean": fmean(rewards)} if rewards else {})


_PREFIX = "task/<task>/"
_OF_TASKS = [metric.name.removeprefix(_PREFIX) for metric in METRICS if metric.name.startswith(_PREFIX)]
"""Names of the metrics of each task. Most are those of all rollouts, computed for the task alone."""


def task_metrics(task: str, trained: Sequence[RolloutGroup], dropped: DroppedGroups) -> dict[str, float]:
    """Compute the metrics of a step's groups of one task.

    Returns:
        num_groups, the number of the task's groups on which the step is trained, and share, their share of all groups
        of the step; reward_mean, reward_std, zero_variance_groups, completion_tokens_mean, completion_tokens_max and
        turns_mean and fault_fraction of these groups; finished_groups, finished_reward_mean, finished_errors and
        finished_fault_fraction as in `finished_figures`; dropped/<reason>, the number of groups dropped for each
        reason.
    """
    groups = [group for group in trained if group.task == task]
    figures = group_metrics(groups)
    figures |= finished_figures(groups, [group for group in dropped.finished if group.task == task])
    reasons = {f"dropped/{reason}": float(count) for (of, reason), count in dropped.reasons.items() if of == task}
    return {
        "num_groups": float(len(groups)),
        "share": len(groups) / len(trained),
        **{name: figures[f"rollout/{name}"] for name in _OF_TASKS if f"rollout/{name}" in figures},
        **reasons,
    }


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
