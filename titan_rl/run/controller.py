"""The training loop: it turns batches of groups into optimizer steps, and sends the new weights to the generators.

A step goes through these stages, each begun by a method of `Controller`, in this order:

    BATCH     consumes finished groups; waits until the scheduler has enough for a step; produces a batch, which holds
              its slots
    TRAIN     consumes the batch; waits only for the trainer; produces the next version of the weights
    PUBLISH   waits until all generators have the previous version, so that at most two are in memory; copies the new
              one, and begins SYNC
    SYNC      in the background: waits until every generator has pulled and verified the version; then releases the
              batch's slots, which admits the groups of a later step
    VALIDATE  when due: waits for SYNC; produces the mean reward on held-out samples, while no step is trained, or in
              the background on generators that keep the version
    SAVE      when due: waits for SYNC, for the previous checkpoint and for a validation of an earlier version; copies
              weights and data position while no step is trained, and begins WRITE
    WRITE     in the background: writes the checkpoint to the disk

The next BATCH and TRAIN therefore overlap SYNC and WRITE, and the scheduler decides how many groups are generated ahead
of them. A step can wait for groups (SYNC frees their slots), for the slowest pull of the previous version, or for the
disk.

A background task that fails ends the loop. However the loop ends, it first waits for a running call of the trainer,
because only then is the trainer's version known, and saves the trained version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from titan_rl.cluster.hosts.lifecycle import HostHistory
from titan_rl.config.build import VERSIONS, make_filters, make_sample_maker
from titan_rl.config.resume_changes import settings_of
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import CheckpointError
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.rollout.group.rollouter import GroupRunner
from titan_rl.rollout.group.transcript import TokenRecords
from titan_rl.rollout.renderer.tokenizer import TokenTexts
from titan_rl.run.directory import RunDirectory, each_of
from titan_rl.run.held_out import best_version, reason_to_stop
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import RunState, train_index
from titan_rl.run.observability.generation_status import GenerationStatus
from titan_rl.run.observability.processor_meter import ProcessorMeter, ProcessorSource
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.rollout_log import GroupRecords, RolloutLog
from titan_rl.run.observability.step_metrics import Stage, StepReports, prefixed
from titan_rl.run.observability.summary import RunSummary
from titan_rl.run.stages.league import FrozenVersions
from titan_rl.run.stages.rollout_stage import RolloutStage, make_mix
from titan_rl.run.stages.training import WeightSync
from titan_rl.run.stages.validation import BackgroundValidation, Validation
from titan_rl.run.terminal.live_display import RunLook
from titan_rl.run.training_loop import TrainingLoop
from titan_rl.scheduling.batches import GroupBatch
from titan_rl.scheduling.filters import GroupFilter
from titan_rl.training.teacher import Teacher
from titan_rl.training.trainer_protocol import Trainer
from titan_rl.weights.types import PublishedWeights

if TYPE_CHECKING:
    from titan_rl.cluster.rollout_worker_pool import WorkerPool


class Controller(TrainingLoop[RunSummary]):
    """Training loop over the planes of one run. It neither starts nor closes the objects that it is given.

    Args:
        group_runners: Runners of groups, by the tasks' names.
        start: State of the checkpoint that the trainer has loaded.
        published: Manifests of published versions, for the router's replicas.
        sinks: Sink for the metrics.
        token_texts: Decoder of tokens for transcripts.
        filters: Group filters that replace those of the settings.
        hosts: Source of reports of joining, draining and lost hosts.
        processes: Processes whose processor time is measured.
        teachers: Teachers that score finished groups, by the tasks' names.
        workers: Rollout workers that run the groups, if there are any.
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
        sinks: MetricSink,
        progress: Progress,
        journal: RunJournal,
        start: RunState = RunState(),  # noqa: B008  frozen
        token_texts: TokenTexts | None = None,
        filters: Sequence[GroupFilter] | None = None,
        hosts: HostHistory | None = None,
        processes: ProcessorSource | None = None,
        teachers: Mapping[str, Teacher] | None = None,
        workers: WorkerPool | None = None,
    ) -> None:
        state = replace(start, settings=settings_of(config))
        super().__init__(config, trainer, run_dir=run_dir, state=state, sinks=sinks, progress=progress)
        self._router = router
        self._journal = journal
        self._syncing: asyncio.Task[None] | None = None  # sync of the newest version, until all generators have it
        tokens = TokenRecords(token_texts, config.scheduling.max_token_age)
        self._transcripts = RolloutLog(
            run_dir,
            config.logging.transcripts_per_step,
            progress,
            tokens if config.logging.transcript_tokens else None,
        )
        tasks = [source.name for source in config.tasks]
        self._reports = StepReports(sinks, progress, self._transcripts, tasks if len(tasks) > 1 else ())
        if start.step:
            self._reports.recall(each_of(run_dir.metrics))
        self._mix = make_mix(config, journal, start)
        self._league = FrozenVersions(config, self._mix, trainer, run_dir.path / VERSIONS, run_dir.checkpoints)
        self._groups = RolloutStage(
            config,
            self._mix,
            group_runners=group_runners,
            router=router,
            journal=journal,
            stop_token_ids=stop_token_ids,
            transcripts=self._transcripts,
            teachers=teachers,
            workers=workers,
        )
        self._records = GroupRecords(self._mix, journal, self._transcripts, progress)
        self._sample_maker = make_sample_maker(config, start.advantages)
        self._scheduler = self._groups.make_scheduler(make_filters(config, filters), self._records, self.version)
        self._sync = WeightSync(
            trainer, published, router, "drain" if config.generation.pull_mode == "drain" else "hot_swap"
        )
        self._validation = Validation(
            config, self._groups, self._transcripts, run_dir, reports=self._reports, progress=progress, start=start
        )
        self._background_validation = BackgroundValidation(
            config, self._validation, trainer, published, router, progress
        )
        self._generation = GenerationStatus(router, config.generation.num_generators, hosts)
        self._processor = ProcessorMeter(processes)

    async def run(self) -> RunSummary:
        """Validate, train, and validate again. However the run ends, a checkpoint is written if a trained model is
        left.

        Raises:
            TitanRLError: The error that ended the run.
        """
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(self._stages.close)
            closing.callback(self._transcripts.close)  # reports the errors of rollouts, even if the run fails
            closing.push_async_callback(self._background_validation.close)
            with self._progress.working("loading the first weights into the generators"):
                await self._sync.begin()
                await self._sync.finish(self.version)
            self._stages.enter(Stage.VALIDATION, self.version)
            await self._validate_first()
            self._stages.begin_step()
            async with self._saved_at_the_end():
                async with asyncio.TaskGroup() as background, self._scheduler:
                    await self._train(background)
                self._stages.enter(Stage.VALIDATION, self.version)
                reward_after = await self._validation.run_once(self.version)
            await self._export()
            return RunSummary(
                reward_before=self._state.reward_before,
                reward_after=reward_after,
                steps=self.version,
                tokens=self._state.tokens,
                seconds=self._run_dir.elapsed_s,
                run_dir=self._run_dir.path,
            )

    @property
    def held_out(self) -> Mapping[int, float]:
        return self._validation.rewards

    def progress(self) -> object:
        """Progress counter for the watchdog: changes with every token, answer and step."""
        return self._generation.progress(), self.version, self._syncing

    def look(self) -> RunLook:
        """Snapshot of groups and generators for the live display."""
        return self._generation.look(self._scheduler.states, self._groups.states(), self.version)

    def waits_for(self) -> str:
        """Description of what the run is waiting for."""
        return "; ".join([*self._generation.waits_for(self._groups.waits()), *self._calls.waits_for()])

    async def _validate_first(self) -> None:
        """Run the first validation. A resumed run repeats a validation that was due when the run was stopped."""
        if not self._config.suites:
            self._progress.message("validation is off: validation.num_prompts = 0")
        if self._state.reward_before is None:
            self._state = replace(self._state, reward_before=await self._validation.run(self.version))
        elif self.version < self._config.training.steps:
            await self._validation.run(self.version, self._validation.due(self.version))

    async def _train(self, background: asyncio.TaskGroup) -> None:
        """Loop over the stages until all steps are trained, all generators have the last version, and no checkpoint is
        being written."""
        await self._freeze_if_due(self.version)  # a run that was stopped at the end of a step has not done this yet
        while self.version < self._config.training.steps and not self._stops_early():
            self._stages.enter(Stage.BATCH, self.version + 1)
            with self._progress.working(f"waiting for the rollouts of step {self.version + 1}", self._progress.slots):
                batch = await self._next_batch(background)
            async with self._groups.paused(self._config.scheduling.on_batch_ready) as paused:
                with self._progress.working(f"training step {batch.step}"):
                    step = await self._calls.finish(self._train_on(batch))
                self._skipped.check()  # may end the run; the batch is settled, so a last checkpoint continues after it
                await self._publish(step, batch, background)
                if paused:
                    await self._pulled(step)
            await self._freeze_if_due(step)
            if step < self._config.training.steps:  # the end has its own validation and checkpoint
                may_be_best = await self._validate_if_due(step, background)
                if self._saver.is_due(step) or (may_be_best and self._config.checkpoint.keep == "best"):
                    await self._save(background)
        await self._pulled(self.version)
        if self._config.validates_beside_training:
            self._stages.enter(Stage.VALIDATION, self.version)
            await self._background_validation.ended()
        self._stages.enter(Stage.CHECKPOINT, self.version)
        await self._saver.written()

    async def _next_batch(self, background: asyncio.TaskGroup) -> GroupBatch:
        """Run BATCH. Meanwhile, the trainer is idle and a requested checkpoint is written."""
        next_batch = asyncio.ensure_future(self._scheduler.next_batch())
        try:
            while await self._saver.requested_before(next_batch):
                await self._save(background)
                self._stages.enter(Stage.BATCH, self.version + 1)
            return await next_batch
        finally:
            next_batch.cancel()

    async def _train_on(self, batch: GroupBatch) -> int:
        """Run TRAIN and return the new version. The batch counts as trained only once the trainer reports it."""
        self._stages.enter(Stage.SAMPLES, self.version + 1)
        samples = self._sample_maker.samples(batch.groups, batch.version)
        self._stages.enter(Stage.TRAIN, self.version + 1)
        result = await self._trainer.step(samples)
        batch.trained(result.version)
        self._mix.trained(train_index(group.group_id) for group in batch.groups)
        self._state = replace(
            self._state,
            step=result.version,
            tokens=self._state.tokens + batch.num_tokens,
            advantages=self._sample_maker.state(),
        )
        skipped = self._skipped.note(result)
        metrics = {**result.metrics, "skipped_steps": float(self._skipped.count)}
        self._reports.trained(result.version, batch, self._records.take_dropped(batch.step), metrics, skipped)
        self._reports.add(result.version, self._stages.metrics() | self._league.metrics())
        return result.version

    async def _publish(self, step: int, batch: GroupBatch, background: asyncio.TaskGroup) -> None:
        """Run PUBLISH, and begin SYNC in the background."""
        with self._progress.working(f"waiting until the generators have loaded version {step - 1}"):
            await self._pulled(step)
            await self._background_validation.before_next_version()
        self._stages.enter(Stage.PUBLISH, step)
        await self._sync.begin()
        self._reports.add(step, self._stages.metrics())
        self._stages.begin_step()
        self._syncing = background.create_task(self._finish_sync(step, batch), name=f"sync-{step}")

    async def _finish_sync(self, step: int, batch: GroupBatch) -> None:
        """Run SYNC, the last stage of a step, and report the step."""
        figures = await self._sync.finish(step)
        batch.release()
        self._reports.add(step, prefixed("sync", figures))
        self._report(step)

    async def _pulled(self, step: int) -> None:
        """Wait until SYNC has ended. Its errors are raised by the run's `TaskGroup`."""
        self._stages.enter(Stage.WAIT_FOR_PULL, step)
        if self._syncing is not None:
            await asyncio.wait([self._syncing])

    async def _freeze_if_due(self, step: int) -> None:
        """Add the version to the leagues of tasks if that is due, before a checkpoint of the version is written."""
        if self._league.is_due(step):
            await self._pulled(step)
            self._stages.enter(Stage.CHECKPOINT, step)
            with self._progress.working(f"freezing version {step}"):
                await self._calls.finish(self._league.freeze(step))

    async def _validate_if_due(self, step: int, background: asyncio.TaskGroup) -> bool:
        """Run VALIDATE if it is due. Return whether the version may have the highest held-out reward so far: a
        validation that continues alongside training will show it."""
        if suites := self._validation.due(step):
            await self._pulled(step)
            self._stages.enter(Stage.VALIDATION, step)
            if await self._background_validation.begin(step, suites, background):
                return self._validation.is_whole(suites)
            await self._validation.run(step, suites)
        return best_version(self.held_out) == step

    def _stops_early(self) -> bool:
        """Return whether the run ends before its last step, and say why."""
        reason = reason_to_stop(self._config.training.stop_at, self.held_out)
        if reason is not None:
            self._progress.message(f"stopping at step {self.version}: {reason}")
        return reason is not None

    async def _save(self, background: asyncio.TaskGroup) -> None:
        """Run SAVE, and begin WRITE in the background."""
        await self._pulled(self.version)
        self._stages.enter(Stage.CHECKPOINT, self.version)
        await self._before_checkpoint()
        await self._saver.begin(background)

    async def _before_checkpoint(self) -> None:
        await self._background_validation.before_checkpoint(self.version)

    def _report(self, step: int) -> None:
        self._reports.add(step, self._generation.take_metrics(step) | self._processor.take_metrics())
        self._reports.report(step)

    def _wind_up(self) -> None:
        """Also report the steps whose versions no generator will pull."""
        super()._wind_up()
        for step in self._reports.unreported:
            self._report(step)

    async def copy_state(self) -> Mapping[str, Any]:
        """Copy the weights and their position in the data for a checkpoint, and begin the next segment of the journal.

        Returns:
            `run_state.json` of the checkpoint.

        Raises:
            DataError: The state of a curriculum cannot be saved.
            CheckpointError: The weights cannot be copied, or the trainer is at another version.
        """
        await self._groups.send_answers()
        state, tasks = self._state, self._mix.state()  # before the first await: later events belong to the new segment
        tokens, held_out = self._router.tokens_so_far(), dict(self.held_out)
        position = await self._journal.checkpoint(state.step, self._scheduler.next_index, tokens)
        run_state = asdict(
            replace(state, next_index=position.next_index, unsettled=position.unsettled, tasks=tasks, held_out=held_out)
        )
        saved = await self._trainer.begin_save(self._run_dir.checkpoints, run_state)
        if saved != state.step:
            raise CheckpointError(f"the trainer saves version {saved}, but the journal is for version {state.step}")
        return run_state

    def forget_before(self, version: int) -> None:
        self._journal.forget_before(version)
