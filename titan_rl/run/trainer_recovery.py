"""Recovery of a trainer whose processes die: new processes load the newest checkpoint and repeat the steps after it.

Callers notice only the delay. A call that a death has interrupted is repeated once the trainer is back at its version,
and recorded steps are repeated without being reported again:

    load      the newest whole checkpoint or, if there is none, the initial model
    repeat    each step after it, on the same samples; a save that was under way is also repeated
    publish   the version that was published last, for generators that start later. Generators that have it keep it:
              they never go back to an earlier version

If the repeated steps compute the same bits, the run's result is that of a run without deaths.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from titan_rl.cluster.processes.roles import FIRST_PAUSE_S, LONGEST_PAUSE_S, Respawns, Role
from titan_rl.config.build import make_sample_maker
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.retries import Backoff
from titan_rl.core.errors import ActorDiedError, DamagedCheckpointError, StateDictError, TrainingError
from titan_rl.core.tracing.spans import span
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress
from titan_rl.scheduling.batches import step_from
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.state.checkpoint import list_checkpoints, step_of
from titan_rl.training.trainer_protocol import StepResult, Trainer
from titan_rl.weights.types import Manifest, PublishedWeights


class TrainedSteps(Protocol):
    """Source of the samples on which each step of a run was trained."""

    def since(self, checkpoint: Path | None, version: int) -> AsyncGenerator[Sequence[TrainingSample]]:
        """Iterate over the samples of each step from a checkpoint to a version, in order.

        Args:
            checkpoint: Folder of the checkpoint; None for the initial model.

        Raises:
            CheckpointError: The samples of a step are lost.
        """
        ...


class JournaledSteps:
    """`TrainedSteps` of a run of reinforcement learning, whose journal has the groups of every batch.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, config: RunConfig, journal: RunJournal, folder: Path) -> None:
        self._config = config
        self._journal = journal
        self._folder = folder

    async def since(self, checkpoint: Path | None, version: int) -> AsyncGenerator[Sequence[TrainingSample]]:
        state = RunState.read(checkpoint or self._folder)
        maker = make_sample_maker(self._config, state.advantages)
        batches = await self._journal.trained_since(state.position, version)
        for before, groups in enumerate(batches, state.step):
            yield maker.samples(groups, before)


NAMED_GROUPS = 4
"""Largest number of a step's groups that a message names."""


class Deaths:
    """Counter of a trainer's deaths, and of deaths within the same step.

    Attributes:
        num_respawns: Number of restarts so far, including those after deaths that do not count.

    Args:
        max_respawns: Limit of deaths that count: `hosts.max_respawns`.
    """

    def __init__(self, max_respawns: int) -> None:
        self._respawns = Respawns(max_respawns)
        self._step: tuple[int, Sequence[TrainingSample]] | None = None
        self._within: Counter[int] = Counter()  # number of deaths by step
        self.num_respawns = 0

    def within(self, step: int, samples: Sequence[TrainingSample]) -> None:
        """Note the step that was being trained at the death that is counted next."""
        self._step = step, samples

    def note(self, why: str, *, excused: bool = False) -> str:
        """Count a death after which the trainer restarts, and return the message about it.

        Args:
            excused: Whether the host was the cause. The death then does not count.

        Raises:
            ActorDiedError: The trainer has died too often.
        """
        self.num_respawns += 1
        if excused:
            self._step = None
            return f"{why}; starting another trainer"
        if self._step is not None:
            (step, samples), self._step = self._step, None
            self._within[step] += 1
            why += f"; it was at step {step}"
            if (times := self._within[step]) > 1:
                why += f" at {times} of its deaths, so the cause may be in the samples of that step: "
                why += named_groups(samples)
        replaced, count = self._respawns.take(Role.TRAINER)
        if not replaced:
            raise ActorDiedError(f"{why}{count}")
        return f"{why}; starting another trainer{count}"


def named_groups(samples: Sequence[TrainingSample]) -> str:
    """Name the groups of samples: "train-4, train-5, train-6, train-7 and 12 more"."""
    groups = list(dict.fromkeys(sample.group_id for sample in samples))
    more = f" and {len(groups) - NAMED_GROUPS} more" if len(groups) > NAMED_GROUPS else ""
    return ", ".join(groups[:NAMED_GROUPS]) + more


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Save:
    """Checkpoint that is being written."""

    version: int
    root: Path
    run_state: dict[str, Any]


class EndingTrainer(Trainer, Protocol):
    """`Trainer` whose processes may end; see `ActorTrainer`."""

    @property
    def excused(self) -> bool: ...

    async def ended(self) -> str: ...

    def end(self, reason: str) -> None: ...


class TrainerGroup(Protocol):
    """Processes of a trainer, or the share of one experiment in them; see `TrainerProcesses`."""

    @property
    def trainer(self) -> EndingTrainer:
        """The newest trainer."""
        ...

    @property
    def waits_for(self) -> str: ...

    async def restart(self) -> EndingTrainer: ...


class RecoveringTrainer:
    """`Trainer` of a run that is restarted when it dies. `recovering` watches it.

    Args:
        group: Processes of the trainer, which has loaded the model but no checkpoint.
        steps: Source of the samples of the trained steps.
        checkpoints: Folder of the checkpoints.
        published: Manifests, to which a version that is published again is added.
        max_respawns: `hosts.max_respawns`.
    """

    def __init__(
        self,
        group: TrainerGroup,
        *,
        steps: TrainedSteps,
        checkpoints: Path,
        published: PublishedWeights,
        max_respawns: int,
        progress: Progress,
    ) -> None:
        self._group = group
        self._trainer = group.trainer
        self._steps = steps
        self._checkpoints = checkpoints
        self._published = published
        self._deaths = Deaths(max_respawns)
        self._progress = progress
        self._is_up = True
        self._lost: str | None = None  # reason why the trainer is not restarted
        self._watching: asyncio.Task[Any] | None = None
        self._changed = asyncio.Event()
        self._in_flight = 0  # number of calls in progress
        self._version = 0  # as reported by the trainer
        self._last_published: int | None = None  # version of the last publication, which may be under way
        self._is_published = False
        self._saving: _Save | None = None
        self._recovery_s = 0.0  # seconds of recovery since the last step

    async def step(self, samples: Sequence[TrainingSample]) -> StepResult:
        """Train a step; see `Trainer.step`. If the trainer has died since the previous step, the metrics include
        recovery_s, in seconds, and respawns, the number in the whole run."""
        result = await self._call("step", samples)
        self._version = result.version
        if not self._recovery_s:
            return result
        figures = {"respawns": float(self._deaths.num_respawns), "recovery_s": self._recovery_s}
        self._recovery_s = 0.0
        return replace(result, metrics=result.metrics | figures)

    async def measure(self, samples: Sequence[TrainingSample]) -> float:
        return await self._call("measure", samples)

    async def begin_publish(self) -> None:
        await self._call("begin_publish")
        self._last_published, self._is_published = self._version, False

    async def finish_publish(self) -> Manifest:
        manifest = await self._call("finish_publish")
        self._is_published = True
        return manifest

    async def hold_published(self, version: int | None) -> bool:
        return await self._call("hold_published", version)

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        version = await self._call("begin_save", root, run_state)
        self._saving = _Save(version, root, run_state)
        return version

    async def finish_save(self) -> None:
        await self._call("finish_save")
        self._saving = None

    async def load(self, checkpoint: Path) -> int:
        self._version = await self._call("load", checkpoint)
        return self._version

    async def export(self, path: Path) -> None:
        await self._call("export", path)

    async def watch(self) -> None:
        """Restart the trainer whenever it dies, until this is cancelled.

        Raises:
            ActorDiedError: The trainer has died too often.
            TitanRLError: The trainer cannot be brought back to its version.
        """
        self._watching = asyncio.current_task()
        try:
            while True:
                await self._recover(await self._trainer.ended())
        except Exception as error:
            self._lost = str(error)
            raise
        finally:
            self._give_up_calls()

    def give_up(self) -> None:
        """Prepare for the end of the run: a living trainer still finishes its call, but a dead one is no longer
        restarted, and calls that wait for it fail."""
        self._give_up_calls()
        if self._watching is not None:
            self._watching.cancel()

    def _warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._progress.warning(text)

    def waits_for(self) -> str:
        """Describe the event for which calls are waiting; "" while they wait for none."""
        if self._is_up:
            return ""
        lacks = self._group.waits_for
        return f"the trainer waits for {lacks}" if lacks else "the trainer is being restarted"

    def _give_up_calls(self) -> None:
        self._lost = self._lost or "trainer died, and the run ends"
        self._notify()

    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the trainer. If the trainer dies, repeat the call on its successor.

        Raises:
            ActorDiedError: The trainer has died, and is not restarted.
        """
        while True:
            while not self._is_up:
                await self._next_change()
            trainer = self._trainer
            self._in_flight += 1
            try:
                return await getattr(trainer, method)(*args)
            except ActorDiedError as error:
                if method == "step":
                    self._deaths.within(step_from(self._version), args[0])
                self._is_up = False
                trainer.end(str(error))
            finally:
                self._in_flight -= 1
                self._notify()

    async def _next_change(self) -> None:
        if self._lost is not None:
            raise ActorDiedError(self._lost)
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _recover(self, why: str) -> None:
        self._is_up = False
        excused, backoff = self._trainer.excused, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        with span("trainer recovery", "trainer", lane="trainer recovery") as recovery:
            while True:
                trainer: EndingTrainer | None = None
                while self._in_flight:  # only once all calls have failed is it known in which one the trainer died
                    await self._next_change()
                self._warn(self._deaths.note(why, excused=excused))
                try:
                    with self._progress.working("restarting the trainer"):
                        trainer = await self._group.restart()
                    description = await self._bring_back(trainer)
                except ActorDiedError as error:
                    why, excused = str(error), error.excused
                    if trainer is None:
                        await backoff.pause()  # the cause may pass
                    else:
                        trainer.end(why)
                        why, excused = await trainer.ended(), trainer.excused
                else:
                    break
        self._trainer, self._is_up = trainer, True
        self._recovery_s += recovery.seconds
        self._warn(f"trainer is running again after {recovery.seconds:.0f} s, {description}")
        self._notify()

    async def _bring_back(self, trainer: EndingTrainer) -> str:
        """Bring a new trainer to the version of the previous one, and return a description of this for the user."""
        checkpoint = await self._load_newest(trainer)
        first = at = 0 if checkpoint is None else step_of(checkpoint)
        with self._progress.working("training again", lambda: f"{at - first} of {self._version - first} steps"):
            await self._repeat_unfinished(trainer, at)
            async with contextlib.aclosing(self._steps.since(checkpoint, self._version)) as steps:
                async for samples in steps:
                    step = step_from(at)
                    try:
                        result = await trainer.step(samples)
                    except ActorDiedError:
                        self._deaths.within(step, samples)
                        raise
                    if result.version != step:
                        raise TrainingError(f"step {step}, trained again, gave version {result.version}")
                    at = step
                    await self._repeat_unfinished(trainer, at)
        if self._is_published:
            await self._publish_again(trainer)
        steps = "1 step was" if at == first + 1 else f"{at - first} steps were"
        return f"at version {at}: {steps} trained again from {checkpoint or 'the model as loaded'}"

    async def _load_newest(self, trainer: EndingTrainer) -> Path | None:
        for checkpoint in reversed(list_checkpoints(self._checkpoints)):
            if step_of(checkpoint) <= self._version:
                try:
                    with self._progress.working(f"loading {checkpoint}"):
                        await trainer.load(checkpoint)
                except DamagedCheckpointError as error:
                    self._warn(f"{error}; an older checkpoint takes its place")
                else:
                    return checkpoint
        return None

    async def _repeat_unfinished(self, trainer: EndingTrainer, version: int) -> None:
        """Repeat a save or publication that the previous trainer had begun at a version and may not have finished."""
        save = self._saving
        if save is not None and save.version == version and version not in map(step_of, list_checkpoints(save.root)):
            await trainer.begin_save(save.root, save.run_state)
        if self._last_published == version:
            await trainer.begin_publish()

    async def _publish_again(self, trainer: EndingTrainer) -> None:
        try:
            self._published.announce(await trainer.finish_publish())
        except StateDictError as error:  # generators that serve have the version
            self._warn(f"version {self._last_published} is not published again: {error}")


@contextlib.asynccontextmanager
async def recovering(trainer: RecoveringTrainer) -> AsyncGenerator[RecoveringTrainer]:
    """Restart a trainer when it dies, during the block. If that fails, the block fails.

    Raises:
        TitanRLError: The trainer cannot be restarted; see `RecoveringTrainer.watch`.
    """
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(trainer.watch(), name="trainer")
        yield trainer
        watching.cancel()


def open_trainer(
    group: TrainerGroup,
    steps: TrainedSteps,
    config: RunConfig,
    run_dir: RunDirectory,
    published: PublishedWeights,
    progress: Progress,
) -> contextlib.AbstractAsyncContextManager[RecoveringTrainer]:
    """Open the trainer of a group as one that is restarted when it dies, for a block; see `RecoveringTrainer`."""
    trainer = RecoveringTrainer(
        group,
        steps=steps,
        checkpoints=run_dir.checkpoints,
        published=published,
        max_respawns=config.hosts.max_respawns,
        progress=progress,
    )
    return recovering(trainer)
