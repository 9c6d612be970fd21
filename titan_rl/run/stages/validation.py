"""Validation: rewards of the policy on held-out samples. It does not influence training: it uses neither training
samples nor the random numbers of training, and informs no curriculum. It runs while no step is trained, or alongside
training. In the latter case the metrics arrive after those of later steps, and the version stays available in one of
two ways:

    pinned       engines that can pin versions keep it besides the newest ones, and requests name it
    dedicated    one generator stays at this version and answers only validation requests, while the others continue

The trainer keeps the published version until the validation has ended, so that a generator that replaces a dead one can
load it: the death of a generator loses nothing. A checkpoint of a later version is written only after the validation
has ended. A resumed run therefore finds either the validation's metrics, or a checkpoint from which it reaches the
version again and validates it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import ResolvedSuite
from titan_rl.core.calls.user_code import reason
from titan_rl.core.clusters import repeated_prompts
from titan_rl.core.errors import RewardError, TitanRLError, TrainingError
from titan_rl.core.tracing.spans import span
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.rollout.group.transcript import ErrorCounts
from titan_rl.rollout.task import measured, sample_id
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.rollout_log import RolloutLog
from titan_rl.run.observability.step_metrics import StepReports, validation_metrics
from titan_rl.run.stages.rollout_stage import RolloutStage
from titan_rl.training.trainer_protocol import HoldingTrainer, Trainer
from titan_rl.weights.types import PublishedWeights

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0

ALONE = "validation"
"""Prefix of the metrics of a suite if there is only one."""
MEAN = "validation/reward_mean"
"""Name of the metric of all suites together."""
ERROR = "validation/reward_error"
"""Name of its standard error."""


class Validation:
    """Runner of a validation: a group for each held-out sample, all at the same time, alongside the training groups
    in flight.

    Args:
        transcripts: Log of the groups.
        run_dir: Folder of the run, with the metrics of earlier processes of the run.
        reports: Reports of the run's steps, to which the metrics are added.
        progress: Display for the progress and the result.
        start: State of the run, with the rewards of earlier validations.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: RolloutStage,
        transcripts: RolloutLog,
        run_dir: RunDirectory,
        *,
        reports: StepReports,
        progress: Progress,
        start: RunState,
    ) -> None:
        self._suites = config.suites
        self._max_lost = config.scheduling.max_failed_groups
        self._groups = groups
        self._transcripts = transcripts
        self._run_dir = run_dir
        self._reports = reports
        self._progress = progress
        self.rewards = dict(start.held_out)  # of all suites together, by version
        if start.step and (reward := run_dir.metric(start.step, MEAN)) is not None:
            self.rewards[start.step] = reward  # it ended alongside training, after the checkpoint had been written
        self._warned: set[str] = set()  # suites of which few prompts are distinct
        self._num_lost = self._most_lost = 0  # groups in a row whose reward failed, and the number that is too many

    async def run_once(self, version: int) -> float | None:
        """Run all suites, or return the earlier result if a process of this run has already validated the version."""
        reward = self.rewards.get(version, self._run_dir.metric(version, MEAN))
        return await self.run(version) if reward is None else reward

    def due(self, step: int) -> list[ResolvedSuite]:
        """List the suites that are due after a step and that no process of this run has already run."""
        due = [suite for suite in self._suites if suite.is_due(step)]
        return [suite for suite in due if self._run_dir.metric(step, _mean_of(suite)) is None]

    def is_whole(self, suites: Sequence[ResolvedSuite]) -> bool:
        """Whether these are all suites, whose mean is the held-out reward of a version."""
        return bool(suites) and len(suites) == len(self._suites)

    async def run(
        self, version: int, suites: Sequence[ResolvedSuite] | None = None, *, beside_training: bool = False
    ) -> float | None:
        """Run suites, by default all.

        Args:
            version: Version that the generators serve.
            beside_training: Whether generators load later versions meanwhile, so that requests name this version.

        Returns:
            The mean over the suites of the mean reward of their scored rollouts; None if there are no suites.

        Raises:
            RewardError: A reward failed on all groups, or on `scheduling.max_failed_groups` groups in a row.
            TrainingError: No rollout of a suite has a reward, or another version has produced some of the tokens.
        """
        suites = self._suites if suites is None else suites
        if not suites:
            return None
        groups = await self._play(suites, version, version if beside_training else None)
        figures: dict[str, float] = {}
        for suite in suites:
            figures |= self._report(version, suite, groups[suite.name])
        mean = fmean(figures[_mean_of(suite)] for suite in suites)
        errors = [figures.get(f"{suite.prefix}/reward_error", math.nan) for suite in suites]
        if self.is_whole(suites):
            figures[MEAN] = self.rewards[version] = mean
            if math.isfinite(error := math.hypot(*errors) / len(errors)):
                figures[ERROR] = error
        self._reports.validated(version, figures)
        return mean

    async def _play(
        self, suites: Sequence[ResolvedSuite], version: int, named_version: int | None
    ) -> dict[str, list[RolloutGroup]]:
        """Run the groups of all suites at the same time."""
        samples = {suite.name: self._groups.validation_samples(suite) for suite in suites}
        total, before = sum(map(len, samples.values())), self._groups.held_out.num_done
        self._num_lost, self._most_lost = 0, min(self._max_lost, total)

        def note() -> str:
            return f"{self._groups.held_out.num_done - before} of {total} groups"

        with self._progress.working(f"validating at step {version}", note):
            async with asyncio.TaskGroup() as tasks:
                running = {
                    suite.name: [
                        tasks.create_task(
                            self._run_group(suite, f"{suite.group_ids}-{index}", sample, version, named_version)
                        )
                        for index, sample in enumerate(samples[suite.name])
                    ]
                    for suite in suites
                }
        played = {name: [task.result() for task in of_suite] for name, of_suite in running.items()}
        _check_versions(version, (group for groups in played.values() for group in groups))
        return played

    async def _run_group(
        self, suite: ResolvedSuite, group_id: str, sample: Any, version: int, named_version: int | None
    ) -> RolloutGroup:
        group = await self._groups.run_validation_group(suite, group_id, sample, named_version)
        if group.failure is None:
            self._num_lost = 0
            return group
        # A lost group is recorded at once, because the validation may fail with it.
        self._transcripts.dropped(group, "reward_failed", version, phase="validation")
        self._num_lost += 1
        if self._num_lost == self._most_lost:
            raise RewardError(
                f"{self._num_lost} held-out groups in a row were lost to failing rewards: {group.failure}"
            )
        return group

    def _report(self, version: int, suite: ResolvedSuite, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Show the result of a suite, and return its metrics, whose names begin with the suite's prefix."""
        self._transcripts.finished(groups, "validation", version)
        errors = ErrorCounts()
        for group in groups:
            errors.add_group(group)
        ids = [sample_id(suite.source.task, group.sample) or group.group_id for group in groups]
        metrics = validation_metrics(groups, suite.prefix, ids)
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
        error = metrics.get(f"{suite.prefix}/reward_error")
        reward = f"{metrics[_mean_of(suite)]:.3f}" + ("" if error is None else f" ± {error:.3f}")
        self._progress.message(f"validation{which} at step {version}: reward {reward}{figures_text}{left_out}")
        repeated = repeated_prompts(len(groups), len(set(ids)))
        if repeated is not None and suite.name not in self._warned:
            self._warned.add(suite.name)
            self._progress.message(f"warning: validation{which}: {repeated}")
        return metrics | figures


def _mean_of(suite: ResolvedSuite) -> str:
    return f"{suite.prefix}/reward_mean"


def _check_versions(version: int, groups: Iterable[RolloutGroup]) -> None:
    """Check that no other version has produced any of the groups' tokens.

    Raises:
        TrainingError: Another version has produced some of them.
    """
    others = Counter[int]()  # number of tokens by version
    for group in groups:
        for rollout in group.rollouts:
            for turn in rollout.turns:
                for each in turn.completion.version_spans:
                    if each.version != version and each.num_tokens:
                        others[each.version] += each.num_tokens
    if others:
        found = ", ".join(f"{count} of version {other}" for other, count in sorted(others.items()))
        raise TrainingError(
            f"the validation of version {version} has tokens of other versions: {found}. A generator reported a "
            "version that it does not have, or loaded another one meanwhile"
        )


class BackgroundValidation:
    """Runner of validations alongside training, one at a time.

    Args:
        published: Manifests of published versions, for the router's replicas.
    """

    def __init__(
        self,
        config: RunConfig,
        validation: Validation,
        trainer: Trainer,
        published: PublishedWeights,
        router: GeneratorRouter,
        progress: Progress,
    ) -> None:
        self._is_on = config.validates_beside_training
        self._pins = config.generation.adapter_swap == "pinned"  # otherwise one generator is dedicated
        self._validation = validation
        self._trainer = trainer
        self._published = published
        self._router = router
        self._progress = progress
        self._version: int | None = None  # version of the validation begun last
        self._task: asyncio.Task[None] | None = None
        self._alone: asyncio.Task[None] | None = None  # waits until the dedicated generator runs no training request

    async def begin(self, version: int, suites: Sequence[ResolvedSuite], background: asyncio.TaskGroup) -> bool:
        """Begin suites once the previous validation has ended. All generators must have the version.

        Args:
            background: Task group that an error of the validation fails. If it is cancelled, the validation continues.

        Returns:
            False, and nothing is begun, if the version cannot be kept, or the run does not validate alongside
            training. Then training has to wait for a validation.
        """
        if not self._is_on:
            return False
        await self.ended()
        if (lacks := await self._keep(version)) is not None:
            self._progress.message(f"training waits for the validation at step {version}: {lacks}")
            return False
        self._version = version
        self._task = asyncio.create_task(self._run(version, suites), name=f"validation-{version}")
        background.create_task(self._fail_with(self._task), name=f"validation-{version}-ends")
        return True

    async def before_next_version(self) -> None:
        """Wait until the next version may be published: the dedicated generator, which must not load it, first finishes
        its training requests."""
        if self._alone is not None:
            await asyncio.wait([self._alone])

    async def before_checkpoint(self, version: int) -> None:
        """Wait until a checkpoint of a version may be written. If the run were killed, a checkpoint of a later version
        than the validated one would lose the validation.

        Raises:
            TrainingError: The validation has failed.
        """
        if self._task is None or self._version is None or version <= self._version:
            return
        if not self._task.done():
            self._progress.message(f"step {version} is saved once the validation at step {self._version} has ended")
        await self.ended()
        error = None if self._task.cancelled() else self._task.exception()
        if self._task.cancelled() or error is not None:
            why = "" if error is None else f" ({reason(error)})"
            raise TrainingError(
                f"the validation at step {self._version} has not ended{why}; --resume continues from the checkpoint "
                "before it, trains on the same groups again, and repeats it"
            ) from error

    async def ended(self) -> None:
        """Wait until the validation has ended or failed."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """End a validation that is still running at the end of the run."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)

    async def _keep(self, version: int) -> str | None:
        """Keep the version available. Return the reason if that is not possible, otherwise None."""
        if not isinstance(self._trainer, HoldingTrainer) or not await self._trainer.hold_published(version):
            return "the trainer or its transport cannot keep a published version"
        if self._pins:
            self._router.pin(version)
        elif not await self._router.dedicate_replica(version):
            await self._trainer.hold_published(None)
            return "too few generators serve to dedicate one"
        else:
            self._alone = asyncio.create_task(self._router.wait_dedicated(), name=f"dedicate-{version}")
        self._published.hold(version, pinned=self._pins)
        return None

    async def _run(self, version: int, suites: Sequence[ResolvedSuite]) -> None:
        try:
            with span("validation", "validation", lane="validation", step=version):
                await self._validation.run(version, suites, beside_training=True)
        except Exception:  # a cancelled validation ends with the run, and everything that it keeps does, too
            await self._let_go()
            raise
        await self._let_go()

    async def _let_go(self) -> None:
        self._router.pin(None)
        self._published.let_go()
        await self._router.release_replica()
        assert isinstance(self._trainer, HoldingTrainer)
        try:
            await self._trainer.hold_published(None)
        except TitanRLError as error:  # a dead trainer holds nothing
            logger.warning("a published version is not released: %s", error)

    async def _fail_with(self, task: asyncio.Task[None]) -> None:
        await asyncio.wait([task])
        await task
