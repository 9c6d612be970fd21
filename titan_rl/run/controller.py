"""The training loop: batches of groups become optimizer steps, whose weights go to the generators.

A step goes through these stages, each a method of `Controller`, in this order:

    BATCH     consumes groups that have finished; waits until the scheduler has as many as a step takes; produces a
              batch, which holds its slots
    TRAIN     consumes the batch; waits for the trainer alone; produces the next version of the weights
    PUBLISH   waits until all generators have the version before, so that two are in memory at most; fixes the new one,
              and begins SYNC
    SYNC      in the background: waits until the version can be read, and every generator has pulled and verified it;
              then releases the batch's slots, which admits the groups of a later step
    VALIDATE  when due: waits for SYNC; produces the mean reward on held-out samples, while no step is trained
    SAVE      when due: waits for SYNC and for the checkpoint before; copies weights and data position while training
              stands, and begins WRITE
    WRITE     in the background: the checkpoint goes to the disk

So the next BATCH and TRAIN overlap SYNC and WRITE, and how many groups are generated ahead of them is the scheduler's
to say. A step is held up by groups that are not there (a slot comes free by SYNC), by the slowest pull of the version
before, or by the disk.

A background task that fails ends the loop. However that ends, a call that changes the trainer is waited for, because
only then its version is known, and what is trained is saved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from titan_rl.calls.user_code import reason
from titan_rl.config.changes import settings_of
from titan_rl.config.make_filters import make_filters
from titan_rl.config.run import RunConfig
from titan_rl.errors import NoSpaceError
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.rollout.group.runner import GroupRunner
from titan_rl.rollout.rewards.advantages import subtract_batch_mean
from titan_rl.run.checkpoints.run_copy import RunCopy
from titan_rl.run.checkpoints.saver import CheckpointSaver
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.run_state import RunState
from titan_rl.run.machine.disk_space import checkpoint_bytes
from titan_rl.run.observability.activity import Activity
from titan_rl.run.observability.group_records import GroupRecords
from titan_rl.run.observability.progress import Progress, RunSummary
from titan_rl.run.observability.rollout_log import RolloutLog
from titan_rl.run.observability.step_reports import StepReports, prefixed
from titan_rl.run.stages.mix import make_mix
from titan_rl.run.stages.rollout_stage import RolloutStage, train_index
from titan_rl.run.stages.trainer_calls import TrainerCalls
from titan_rl.run.stages.validation import Validation
from titan_rl.run.stages.weight_sync import WeightSync
from titan_rl.scheduling.batch import GroupBatch
from titan_rl.scheduling.filters import GroupFilter
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.training.protocol import Trainer
from titan_rl.weights.published_weights import PublishedWeights

logger = logging.getLogger(__name__)


class Controller:
    """Runs the loop over the planes of one run. It starts and ends nothing that it was given.

    Args:
        group_runners: by the tasks' names.
        start: of the checkpoint that the trainer has loaded.
        published: where the router's replicas find the manifests of published versions.
        log: called with (step, metrics) for every record.
        filters: which groups are not trained on, in the place of those that settings name.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        group_runners: Mapping[str, GroupRunner],
        router: GeneratorRouter,
        trainer: Trainer,
        stop_token_ids: Sequence[int],
        published: PublishedWeights,
        run_dir: RunDirectory,
        log: Callable[[int, dict[str, float]], None],
        progress: Progress,
        journal: RunJournal,
        start: RunState = RunState(),  # noqa: B008  it is frozen
        filters: Sequence[GroupFilter] | None = None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._run_dir = run_dir
        self._tell = progress.message
        self._state = replace(start, settings=settings_of(config))  # of the version that the trainer said last
        self._syncing: asyncio.Task[None] | None = None  # the newest version, until all generators have it
        self._writing: asyncio.Task[None] | None = None  # the newest checkpoint, until it is whole
        self._calls = TrainerCalls()
        self._transcripts = RolloutLog(run_dir.write_rollout, config.logging.transcripts_per_step, self._tell)
        tasks = [source.name for source in config.tasks]
        self._reports = StepReports(log, progress, self._transcripts, tasks if len(tasks) > 1 else ())
        self._mix = make_mix(config, journal, start)
        self._groups = RolloutStage(
            config,
            self._mix,
            group_runners=group_runners,
            router=router,
            journal=journal,
            stop_token_ids=stop_token_ids,
            on_ended=self._transcripts.ended,
            on_lost=self._transcripts.lost,
        )
        self._records = GroupRecords(self._mix, journal, self._transcripts)
        self._scheduler = self._make_scheduler(journal, make_filters(config, filters))
        self._sync = WeightSync(trainer, published, router, config.generation.pull_mode)
        self._validation = Validation(config, self._groups, self._transcripts, run_dir, log=log, tell=self._tell)
        self._saver = self._make_saver(router, journal)
        self._activity = Activity(router, self._groups.requests, config.generation.num_generators)

    def _make_scheduler(self, journal: RunJournal, filters: Sequence[GroupFilter]) -> GroupScheduler:
        config = self._config
        return GroupScheduler(
            self._groups.run_training_group,
            config.scheduling,
            group_size=config.rollout.group_size,
            budget=(config.training.steps - self.version) * config.scheduling.groups_per_step,
            filters=filters,
            version=self.version,
            backlog=journal.backlog(self._groups.train_sample),
            observer=self._records,
        )

    def _make_saver(self, router: GeneratorRouter, journal: RunJournal) -> CheckpointSaver:
        copy = RunCopy(self._run_dir.checkpoints, self._trainer, journal, self._mix, self._scheduler, router)
        return CheckpointSaver(
            self._config.checkpoint,
            self._run_dir.checkpoints,
            self._trainer,
            estimate=checkpoint_bytes(self._config),
            copy=lambda version: copy.make(self._state),
            forget_before=journal.forget_before,
            tell=self._tell,
            version=self.version,
        )

    async def run(self) -> RunSummary:
        """Validate, train, validate again. A checkpoint is written on every way out that leaves a trained model.

        Raises:
            TitanRLError: what ended the run, of whichever part.
        """
        await self._sync.begin()
        await self._sync.finish(self.version)
        await self._validate_first()
        try:
            async with asyncio.TaskGroup() as background, self._scheduler:
                await self._train(background)
            reward_after = await self._validation.run_once(self.version)
            await self._saver.save_last(self.version)
        except NoSpaceError:  # of the last save
            raise
        except BaseException:
            await self._save_what_is_trained()
            raise
        await self._trainer.export(self._run_dir.export)
        return RunSummary(
            reward_before=self._state.reward_before,
            reward_after=reward_after,
            steps=self.version,
            tokens=self._state.tokens,
            seconds=self._run_dir.elapsed_s,
            run_dir=self._run_dir.path,
        )

    @property
    def version(self) -> int:
        """The version of the weights after the step that was trained last, as the trainer said."""
        return self._state.step

    def progress(self) -> object:
        """Differs once anything has happened: a token, an answer, a step."""
        return self._activity.progress(), self.version, self._syncing

    def waits_for(self) -> str:
        """What has to happen for the run to go on, as far as that is known."""
        return "; ".join([*self._activity.waits_for(), *["the trainer is at work"] * self._calls.running])

    def close(self) -> None:
        """Tell what went wrong with rollouts, however the run ended."""
        self._transcripts.close()

    async def _validate_first(self) -> None:
        """What the run begins with; one that goes on validates where it was stopped between a step and that."""
        if not self._validation.is_on:
            self._tell("validation is off: validation.num_prompts = 0")
        if self._state.reward_before is None:
            self._state = replace(self._state, reward_before=await self._validation.run(self.version))
        elif self._validation.is_due(self.version) and self.version < self._config.training.steps:
            await self._validation.run_due(self.version)

    async def _train(self, background: asyncio.TaskGroup) -> None:
        """The loop over the stages, until all steps are trained, all generators have the last, and nothing is written
        any more."""
        while self.version < self._config.training.steps:
            began = time.monotonic()
            batch = await self._scheduler.next_batch()
            waited = time.monotonic() - began
            async with self._groups.paused(self._config.scheduling.on_batch_ready) as paused:
                step = await self._calls.finish(self._train_on(batch))
                await self._publish(step, batch, background)
                self._reports.add(step, {"time/wait_for_rollouts_s": waited, "time/step_s": time.monotonic() - began})
                if paused:
                    await ended(self._syncing)
            if step < self._config.training.steps:  # the end has a validation and a checkpoint of its own
                await self._validate_if_due(step)
                await self._save_if_due(step, background)
        await ended(self._syncing)
        await ended(self._writing)

    async def _train_on(self, batch: GroupBatch) -> int:
        """TRAIN, and the version that it makes. The batch is trained once the trainer says so, and not before."""
        began = time.monotonic()
        result = await self._trainer.step(self._samples(batch))
        batch.trained(result.version)
        self._mix.trained(train_index(group.group_id) for group in batch.groups)
        self._state = replace(self._state, step=result.version, tokens=self._state.tokens + batch.num_tokens)
        self._reports.trained(result.version, batch, self._records.take_dropped(batch.step), result.metrics)
        self._reports.add(result.version, {"time/step_s": time.monotonic() - began})
        return result.version

    async def _publish(self, step: int, batch: GroupBatch, background: asyncio.TaskGroup) -> None:
        """PUBLISH."""
        began = time.monotonic()
        await ended(self._syncing)
        settled = time.monotonic()
        await self._sync.begin()
        begun = time.monotonic()
        self._reports.add(step, {"sync/wait_for_pull_s": settled - began, "sync/begin_publish_s": begun - settled})
        self._syncing = background.create_task(self._finish_sync(step, batch), name=f"sync-{step}")

    async def _finish_sync(self, step: int, batch: GroupBatch) -> None:
        """SYNC. With it all is known of the step."""
        figures = await self._sync.finish(step)
        batch.release()
        self._reports.add(step, prefixed("sync", figures))
        self._report(step)

    async def _validate_if_due(self, step: int) -> None:
        """VALIDATE."""
        if self._validation.is_due(step):
            await ended(self._syncing)
            await self._validation.run_due(step)

    async def _save_if_due(self, step: int, background: asyncio.TaskGroup) -> None:
        """SAVE, which begins WRITE where the disk has room."""
        if not self._saver.is_due(step):
            return
        await ended(self._syncing)
        await ended(self._writing)
        if await self._calls.finish(self._saver.begin(step)):
            self._writing = background.create_task(self._saver.finish(), name=f"checkpoint-{step}")

    def _samples(self, batch: GroupBatch) -> list[TrainingSample]:
        for source in self._config.tasks:
            if self._config.advantage_of(source) == "batch_mean":
                subtract_batch_mean([group for group in batch.groups if group.task == source.name])
        max_age = self._config.scheduling.max_token_age
        oldest = 0 if max_age is None else batch.version - max_age
        return [s for group in batch.groups for s in build_samples(group, oldest_version=oldest)]

    def _report(self, step: int) -> None:
        self._reports.add(step, self._activity.take_metrics(step))
        self._reports.report(step)

    async def _save_what_is_trained(self) -> None:
        """On the way out of a run that failed or was stopped. What ended it is not to be hidden by this. It takes as
        long as it takes; who does not want to wait cancels once more."""
        try:
            if self._calls.running:
                logger.info("stopped at version %d, with the trainer at work: waiting for it to finish", self.version)
            await self._calls.wait()
            for step in self._reports.unreported:
                self._report(step)
            if self.version:
                await self._saver.save_last(self.version)
        except Exception as error:
            logger.warning("step %d is not saved", self.version, exc_info=error)
            self._tell(f"step {self.version} is not saved: {reason(error)}")


async def ended(task: asyncio.Task[None] | None) -> None:
    """Wait for a task of the run's `TaskGroup`, which raises what the task did."""
    if task is not None:
        await asyncio.wait([task])
