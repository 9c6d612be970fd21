"""The run: rollouts, optimizer steps, state-dict sync and validation, overlapped up to the set staleness."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from titan_rl.calls.cancellation import stray_cancellation_fails
from titan_rl.calls.user_code import reason
from titan_rl.config.changes import settings_of
from titan_rl.config.run import RunConfig
from titan_rl.errors import CheckpointError, NoSpaceError, TrainingError
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.rollout.group.runner import GroupRunner
from titan_rl.rollout.rewards.advantages import subtract_batch_mean
from titan_rl.rollout.task import FilteringTask, Task, drop_reason
from titan_rl.run.checkpoint_saver import CheckpointSaver
from titan_rl.run.directory import RunDirectory
from titan_rl.run.group_player import GroupPlayer
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.run_state import RunState
from titan_rl.run.machine.disk_space import checkpoint_bytes
from titan_rl.run.observability.progress import Progress, RunSummary
from titan_rl.run.observability.rollout_log import RolloutLog
from titan_rl.run.observer import RunObserver, finished_figures
from titan_rl.run.reporter import RunReporter
from titan_rl.scheduling.batch import GroupBatch
from titan_rl.scheduling.filters import BY_NAME, GroupFilter, too_few_siblings, too_long
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.training.protocol import Trainer
from titan_rl.weights.board import VersionBoard

logger = logging.getLogger(__name__)

R = TypeVar("R")


class Controller:
    """Wires the planes of one run together. It starts and ends nothing that it was given.

    Args:
        start: of the checkpoint that the trainer has loaded.
        board: where the router's replicas find the manifests of published versions.
        log: called with (step, metrics) for every record.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        *,
        rollouter: GroupRunner,
        router: GeneratorRouter,
        trainer: Trainer,
        stop_token_ids: Sequence[int],
        board: VersionBoard,
        run_dir: RunDirectory,
        log: Callable[[int, dict[str, float]], None],
        progress: Progress,
        journal: RunJournal,
        start: RunState = RunState(),  # noqa: B008  it is frozen
    ) -> None:
        self._config = config
        self._router = router
        self._trainer = trainer
        self._board = board
        self._run_dir = run_dir
        self._progress = progress
        self._journal = journal
        self._reward_before = start.reward_before
        self._version = start.step  # the trainer's, as it said last
        self._in_flight: asyncio.Future[Any] | None = None  # what changes the trainer, until it is done
        self._unreported: dict[int, tuple[GroupBatch, dict[str, float]]] = {}  # steps, with their metrics so far
        self._syncing: asyncio.Task[None] | None = None  # of the newest version, until all generators have it
        self._saving: asyncio.Task[None] | None = None  # the newest checkpoint, until it is whole
        self._saver = CheckpointSaver(
            config.checkpoint,
            run_dir.checkpoints,
            trainer,
            estimate=checkpoint_bytes(config),
            copy=self._copy_for_checkpoint,
            forget_before=journal.forget_before,
            tell=progress.message,
            version=start.step,
        )
        self._tokens = start.tokens
        self._rollouts = RolloutLog(run_dir.write_rollout, config.logging.transcripts_per_step, progress.message)
        self._observer = RunObserver(journal, self._rollouts, self._version)
        self._reporter = RunReporter(log, progress, self._rollouts, run_dir.path)
        self._player = GroupPlayer(
            config,
            task,
            runner=rollouter,
            router=router,
            journal=journal,
            stop_token_ids=stop_token_ids,
            on_ended=self._rollouts.ended,
            on_lost=self._rollouts.lost,
        )
        self._scheduler = GroupScheduler(
            self._player.train_group,
            config.scheduling,
            group_size=config.rollout.group_size,
            budget=(config.training.steps - self._version) * config.scheduling.groups_per_step,
            filters=make_filters(config, task),
            version=self._version,
            backlog=journal.backlog(self._player.train_sample),
            observer=self._observer,
        )

    async def run(self) -> RunSummary:
        """Validate, train, validate again. A checkpoint is written on every way out that leaves a trained model.

        Raises:
            TitanRLError: what ended the run, of whichever part.
        """
        await self._trainer.begin_publish()
        await self._sync(self._version)
        if not self._config.validation.num_prompts:
            self._progress.message("validation is off: validation.num_prompts = 0")
        if self._reward_before is None:
            self._reward_before = await self._validate()
        elif is_due(self._version, self._config.validation.interval) and self._version < self._config.training.steps:
            await self._validate_once()
        try:
            async with asyncio.TaskGroup() as background, self._scheduler:
                await self._train(background)
            reward_after = await self._validate_once()
            await self._saver.save_last(self._version)
        except NoSpaceError:  # of the last save
            raise
        except BaseException:
            await self._save_what_is_trained()
            raise
        await self._trainer.export(self._run_dir.export)
        return RunSummary(
            reward_before=self._reward_before,
            reward_after=reward_after,
            steps=self._version,
            tokens=self._tokens,
            seconds=self._run_dir.elapsed_s,
            run_dir=self._run_dir.path,
        )

    @property
    def version(self) -> int:
        """The step that was trained last, as the trainer said."""
        return self._version

    def progress(self) -> object:
        """Differs once anything has happened: a token, an answer, a step."""
        tokens = sum(len(answer.token_ids) for answer in self._router.tokens_so_far().values())
        return self._player.requests.num_done, tokens, self._version, self._syncing

    def waits_for(self) -> str:
        """What has to happen for the run to go on, as far as that is known."""
        serving = [member.name for member in self._router.members if member.serving]
        errors = [f"{member.name}: {member.last_error}" for member in self._router.members if member.last_error]
        parts = [
            f"{self._player.requests.now} requests are in flight",
            f"{len(serving)} of {self._config.generation.num_generators} generators serve",
            *errors,
        ]
        if self._in_flight is not None and not self._in_flight.done():
            parts.append("the trainer is at work")
        return "; ".join(parts)

    def close(self) -> None:
        """Tell what went wrong with rollouts, however the run ended."""
        self._rollouts.close()

    async def _train(self, background: asyncio.TaskGroup) -> None:
        """Consumes batches in data order. While the generators pull the version of a step, the next step begins if it
        has its groups; a version is published once they have the one before."""
        last = self._config.training.steps
        while self._version < last:
            began = time.monotonic()
            batch = await self._scheduler.next_batch()
            waited = time.monotonic() - began
            async with self._interrupted_generation() as interrupted:
                step = await self._landed(self._train_on(batch))
                metrics = self._unreported[step][1]
                stepped = time.monotonic()
                await ended(self._syncing)
                settled = time.monotonic()
                await self._trainer.begin_publish()
                now = time.monotonic()
                metrics |= {"sync/wait_for_pull_s": settled - stepped, "sync/begin_publish_s": now - settled}
                metrics |= {"time/wait_for_rollouts_s": waited, "time/step_s": now - began}
                self._syncing = background.create_task(self._finish_step(step), name=f"sync-{step}")
                if interrupted:
                    await ended(self._syncing)
            if is_due(step, self._config.validation.interval) and step < last:
                await ended(self._syncing)
                await self._validate()
            if self._saver.is_due(step) and step < last:
                await ended(self._syncing)
                await ended(self._saving)
                if await self._landed(self._saver.begin(step)):
                    self._saving = background.create_task(self._saver.finish(), name=f"checkpoint-{step}")
        await ended(self._syncing)
        await ended(self._saving)

    async def _train_on(self, batch: GroupBatch) -> int:
        """One step, and the version that it makes. The batch is trained once the trainer says so, and not before."""
        began = time.monotonic()
        result = await self._trainer.step(self._samples(batch))
        if result.version != batch.version + 1:
            raise TrainingError(
                f"the step from version {batch.version} gave version {result.version}: the trainer and the data are "
                "out of step"
            )
        self._version = result.version
        self._tokens += batch.num_tokens
        metrics = prefixed("train", result.metrics) | prefixed("scheduling", batch.metrics)
        self._unreported[result.version] = batch, metrics | {"time/step_s": time.monotonic() - began}
        return result.version

    async def _landed(self, call: Coroutine[Any, Any, R]) -> R:
        """What a call that changes the trainer, or saves it, returns. The trainer goes on with it when this is
        cancelled, so the call does, too: `_wait_for_landing` is its end then."""
        self._in_flight = asyncio.ensure_future(call)
        with stray_cancellation_fails("a call of the trainer"):
            return await asyncio.shield(self._in_flight)

    async def _wait_for_landing(self) -> None:
        """On the way out: only when nothing is in flight the version is known."""
        if self._in_flight is not None:
            if not self._in_flight.done():
                logger.info("stopped at version %d, with the trainer at work: waiting for it to finish", self._version)
            await asyncio.wait([self._in_flight])
            if not self._in_flight.cancelled() and (error := self._in_flight.exception()) is not None:
                logger.warning("what the trainer was at work on failed: %r", error)
        for step in sorted(self._unreported):
            self._report(step)

    async def _finish_step(self, step: int) -> None:
        """The batch's slots come free once all generators have what was trained on it, which admits the groups of a
        later step."""
        batch, metrics = self._unreported[step]
        metrics |= await self._sync(step)
        batch.release()
        self._report(step)

    async def _sync(self, version: int) -> dict[str, float]:
        """Have every generator pull and verify the version that is being published."""
        began = time.monotonic()
        manifest = await self._trainer.finish_publish()
        if manifest.version != version:
            raise TrainingError(f"the trainer publishes version {manifest.version} where the run is at {version}")
        published = time.monotonic()
        self._board.announce(manifest)
        await self._router.pull_state_dict(manifest.version, self._config.generation.pull_mode)
        pulled = time.monotonic()
        figures = prefixed("sync", self._board.worst())
        return figures | {"sync/publish_s": published - began, "sync/pull_s": pulled - published}

    @contextlib.asynccontextmanager
    async def _interrupted_generation(self) -> AsyncGenerator[bool]:
        """What `scheduling.on_batch_ready` says of rollouts in flight while a batch is trained and pulled. Whether they
        are interrupted."""
        mode = self._config.scheduling.on_batch_ready
        if mode == "continue":
            yield False
            return
        async with self._player.paused(mode):
            yield True

    async def _validate(self) -> float | None:
        """Mean reward on the held-out samples, of the rollouts that have one. None if validation is off."""
        if not self._config.validation.num_prompts:
            return None
        version = self._version
        groups = await self._player.validation_groups(on_lost=partial(self._reporter.validation_lost, version))
        return self._reporter.validation(version, groups)

    async def _validate_once(self) -> float | None:
        """As `_validate`, unless the run was stopped after it had validated this version."""
        reward = self._run_dir.metric(self._version, "validation/reward_mean")
        return await self._validate() if reward is None else reward

    def _samples(self, batch: GroupBatch) -> list[TrainingSample]:
        if self._config.training.advantage == "batch_mean":
            subtract_batch_mean(batch.groups)
        temperature, max_age = self._config.sampling.temperature, self._config.scheduling.max_token_age
        oldest = 0 if max_age is None else batch.version - max_age
        return [s for group in batch.groups for s in build_samples(group, temperature, oldest_version=oldest)]

    def _report(self, step: int) -> None:
        batch, metrics = self._unreported.pop(step)
        metrics["generation/requests_in_flight_max"] = float(self._player.requests.take())
        finished = finished_figures(batch.groups, self._observer.take_dropped(batch.version))
        self._reporter.step(step, batch, metrics | finished)

    async def _copy_for_checkpoint(self, version: int) -> None:
        position = await self._journal.checkpoint(version, self._scheduler.next_index, self._router.tokens_so_far())
        state = RunState(
            step=version,
            tokens=self._tokens,
            reward_before=self._reward_before,
            next_index=position.next_index,
            unsettled=position.unsettled,
            settings=settings_of(self._config),
        )
        saved = await self._trainer.begin_save(self._run_dir.checkpoints, asdict(state))
        if saved != version:
            raise CheckpointError(f"the trainer saves version {saved}, and the journal is that of version {version}")

    async def _save_what_is_trained(self) -> None:
        """On the way out of a run that failed or was stopped. What ended it is not to be hidden by this. It takes as
        long as it takes; who does not want to wait cancels once more."""
        try:
            await self._wait_for_landing()
            if self._version:
                await self._saver.save_last(self._version)
        except Exception as error:
            logger.warning("step %d is not saved", self._version, exc_info=error)
            self._progress.message(f"step {self._version} is not saved: {reason(error)}")


def make_filters(config: RunConfig, task: Task) -> list[GroupFilter]:
    """What always makes a group unfit for training, then the config's filters, then the task's own."""
    named = [BY_NAME[name] for name in config.scheduling.filters]
    own = [partial(drop_reason, task)] if isinstance(task, FilteringTask) else []
    return [too_few_siblings, too_long(config.training.row_tokens), *named, *own]


async def ended(task: asyncio.Task[None] | None) -> None:
    """Wait for a task of the run's `TaskGroup`, which raises what the task did."""
    if task is not None:
        await asyncio.wait([task])


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
