"""Validation: rewards of the policy on held-out samples. It does not influence training: it uses neither training
samples nor the random numbers of training, and informs no curriculum. It runs while no step is trained, or beside
training. In the latter case generators keep the version that is validated, and its metrics arrive after those of later
steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import ResolvedSuite
from titan_rl.core.errors import RewardError, TrainingError
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.rollout.group.transcript import ErrorCounts
from titan_rl.rollout.task import measured
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.rollout_log import RolloutLog
from titan_rl.run.observability.steps import validation_metrics
from titan_rl.run.stages.rollout_stage import EvaluatedVersion, RolloutStage

ALONE = "validation"
"""Prefix of the metrics of a suite if there is only one."""
MEAN = "validation/reward_mean"
"""Name of the metric of all suites together."""


class Validation:
    """Runner of a validation: a group for each held-out sample, all at the same time, beside the training groups in
    flight.

    Args:
        transcripts: Log of the groups.
        run_dir: Folder of the run, with the metrics of earlier processes of the run.
        sinks: Sink for the metrics.
        progress: Display for the progress and the result.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: RolloutStage,
        transcripts: RolloutLog,
        run_dir: RunDirectory,
        *,
        sinks: MetricSink,
        progress: Progress,
    ) -> None:
        self._suites = config.suites
        self._max_lost = config.scheduling.max_failed_groups
        self._groups = groups
        self._transcripts = transcripts
        self._run_dir = run_dir
        self._sinks = sinks
        self._progress = progress

    @property
    def is_on(self) -> bool:
        return bool(self._suites)

    def is_due(self, step: int) -> bool:
        return any(suite.is_due(step) for suite in self._suites)

    async def run(self, version: int) -> float | None:
        """Run all suites.

        Args:
            version: Version that the generators serve.

        Returns:
            The mean over the suites of the mean reward of their scored rollouts; None if validation is off.

        Raises:
            RewardError: A reward failed on all groups, or on `scheduling.max_failed_groups` groups in a row.
            TrainingError: No rollout of a suite has a reward.
        """
        return await self._run(version, self._suites)

    async def run_once(self, version: int) -> float | None:
        """Run all suites, or return the earlier result if a process of this run has already validated the version."""
        reward = self._run_dir.metric(version, MEAN)
        return await self.run(version) if reward is None else reward

    def due(self, step: int) -> list[ResolvedSuite]:
        """List the suites that are due after a step and that no process of this run has already run."""
        due = [suite for suite in self._suites if suite.is_due(step)]
        return [suite for suite in due if self._run_dir.metric(step, _mean_of(suite)) is None]

    async def run_suites(self, step: int, suites: Sequence[ResolvedSuite], *, beside_training: bool = False) -> None:
        """Run some suites after a step; see `run`.

        Args:
            beside_training: Whether generators go on to later versions meanwhile, so that requests name this version.
        """
        await self._run(step, suites, beside_training)

    async def _run(self, version: int, suites: Sequence[ResolvedSuite], beside_training: bool = False) -> float | None:
        if not suites:
            return None
        groups = await self._play(suites, version, EvaluatedVersion(version, is_named=beside_training))
        figures: dict[str, float] = {}
        for suite in suites:
            figures |= self._report(version, suite, groups[suite.name])
        mean = fmean(figures[_mean_of(suite)] for suite in suites)
        self._sinks.log(version, figures | ({MEAN: mean} if len(suites) == len(self._suites) else {}))
        return mean

    async def _play(
        self, suites: Sequence[ResolvedSuite], version: int, evaluated: EvaluatedVersion
    ) -> dict[str, list[RolloutGroup]]:
        """Run the groups of all suites at the same time."""
        samples = {suite.name: self._groups.validation_samples(suite) for suite in suites}
        total, before = sum(map(len, samples.values())), self._groups.held_out.num_done
        lost = LostInARow(min(self._max_lost, total))

        def note() -> str:
            return f"{self._groups.held_out.num_done - before} of {total} groups"

        with self._progress.working(f"validating at step {version}", note):
            async with asyncio.TaskGroup() as tasks:
                running = {
                    suite.name: [
                        tasks.create_task(
                            self._run_group(version, evaluated, suite, f"{suite.group_ids}-{index}", sample, lost)
                        )
                        for index, sample in enumerate(samples[suite.name])
                    ]
                    for suite in suites
                }
        evaluated.check()
        return {name: [task.result() for task in of_suite] for name, of_suite in running.items()}

    async def _run_group(
        self,
        version: int,
        evaluated: EvaluatedVersion,
        suite: ResolvedSuite,
        group_id: str,
        sample: Any,
        lost: LostInARow,
    ) -> RolloutGroup:
        group = await self._groups.run_validation_group(suite, group_id, sample, evaluated)
        if group.failure is not None:  # reported at once: the validation may fail with it
            self._transcripts.dropped(group, "reward_failed", version, phase="validation")
        lost.count(group)
        return group

    def _report(self, version: int, suite: ResolvedSuite, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Show the result of a suite, and return its metrics, whose names begin with the suite's prefix."""
        self._transcripts.finished(groups, "validation", version)
        errors = ErrorCounts()
        for group in groups:
            errors.add_group(group)
        metrics = validation_metrics(groups, suite.prefix)
        if _mean_of(suite) not in metrics:
            raise TrainingError(
                f"no validation rollout got a reward: {errors.describe() or 'none was judged'}; see "
                f"{self._run_dir.rollouts} and logs/controller.log"
            )
        judged = [group for group in groups if group.failure is None]
        figures = {f"{suite.prefix}/{name}": value for name, value in measured(suite.source.task, judged).items()}
        figures_text = "".join(
            f", {name.removeprefix(f'{suite.prefix}/')} {value:.3f}" for name, value in figures.items()
        )
        left_out = f", without those that failed: {errors.describe()}" if errors.num_errors else ""
        which = "" if suite.prefix == ALONE else f" of {suite.name}"
        self._progress.message(
            f"validation{which} at step {version}: reward {metrics[_mean_of(suite)]:.3f}{figures_text}{left_out}"
        )
        return metrics | figures


def _mean_of(suite: ResolvedSuite) -> str:
    return f"{suite.prefix}/reward_mean"


class LostInARow:
    """Counter of consecutive held-out groups whose reward failed.

    Args:
        most: Number of such groups at which the validation fails.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def count(self, group: RolloutGroup) -> None:
        """Count a group.

        Raises:
            RewardError: The limit is reached.
        """
        self._count = 0 if group.failure is None else self._count + 1
        if group.failure is not None and self._count == self._most:
            raise RewardError(f"{self._count} held-out groups in a row were lost to failing rewards: {group.failure}")
