"""Checkpoints of a run, which are copied while training pauses and written to disk while it continues, and resumption
from a checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titan_rl.config.changes import check_unchanged
from titan_rl.config.model_files import changed_parts
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import CheckpointConfig
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import CheckpointError, DamagedCheckpointError, NoSpaceError
from titan_rl.core.tracing.spans import span
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.state import FILE, JournalContents, RunState, list_segments, read_segments
from titan_rl.run.machine.requirements import free_bytes, gigabytes, no_space, require_room, size_of
from titan_rl.run.observability.progress import Progress
from titan_rl.run.stages.training import TrainerCalls
from titan_rl.scheduling.task_mix import MixState
from titan_rl.training.protocol import Trainer
from titan_rl.training.state.checkpoint import (
    CHECKSUMS,
    being_written,
    keep_last,
    latest,
    list_checkpoints,
    step_directory,
    step_of,
    unwritten,
    verify,
    write_checksums_of,
)


def is_complete(root: Path, version: int) -> bool:
    """Return whether the trainer itself has written the state and the checksums of a checkpoint."""
    folder = _folder(root, version)
    return (folder / FILE).is_file() and (folder / CHECKSUMS).is_file()


def complete(root: Path, version: int, run_state: Mapping[str, Any]) -> None:
    """Write the state and the checksums of a checkpoint if they are missing. If a trainer has nothing to save, its
    folder is missing too, and is created.

    Args:
        root: Folder of the checkpoints.
        run_state: Run state that the trainer was given.

    Raises:
        NoSpaceError: The disk is full.
        CheckpointError: The checkpoint could not be written for another reason.
    """
    folder = _folder(root, version)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).is_file():
            (folder / FILE).write_text(json.dumps(run_state))
        if not (folder / CHECKSUMS).is_file():
            write_checksums_of(folder)
    except OSError as error:
        raise unwritten(folder, error) from error


def _folder(root: Path, version: int) -> Path:
    """Folder of a version's checkpoint, whose number may have fewer digits than usual: `step-4` is that of version
    4."""
    found = (path for path in list_checkpoints(root) if step_of(path) == version)
    return next(found, step_directory(root, version))


SHARE = 0.1
"""Largest share of the run's time that writing checkpoints by `checkpoint.interval_s` may take."""

REPORT_EVERY_S = 30.0


class SavedRun(Protocol):
    """Run whose state is saved."""

    @property
    def version(self) -> int:
        """Version of the weights, as reported by the trainer."""
        ...

    async def copy_state(self) -> Mapping[str, Any]:
        """Have the trainer copy its weights and state for a checkpoint, so that training may change them afterwards.
        Return the `run_state` that the trainer was given.

        Raises:
            CheckpointError: The state cannot be copied.
        """
        ...

    def forget_before(self, version: int) -> None:
        """Delete records that only checkpoints before a version need."""
        ...


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copy of a run that is being written."""

    version: int
    run_state: Mapping[str, Any]
    began_at: float


class CheckpointSaver:
    """Writer of a run's checkpoints, one at a time, while the run continues and when it ends. A checkpoint that does
    not fit on the disk is skipped with a message, and retried when the next one is due; the last one has to fit.

    Args:
        run: Run to save. Its current version is already saved.
        calls: Calls of the trainer, to which the copies are added.
        root: Folder of the checkpoints.
        estimate: Size to assume while there is no checkpoint, in bytes.
    """

    def __init__(
        self,
        run: SavedRun,
        calls: TrainerCalls,
        config: CheckpointConfig,
        root: Path,
        *,
        estimate: int,
        progress: Progress,
    ) -> None:
        self._run = run
        self._calls = calls
        self._config = config
        self._root = root
        self._estimate = estimate
        self._progress = progress
        self._saved = run.version
        self._copy: _Copy | None = None  # until it is whole on the disk
        self._wait_s = config.interval_s  # seconds from the end of one checkpoint to the next by time
        self._ended_at: float | None = None
        self._writing: asyncio.Task[None] | None = None  # the newest checkpoint, until it is whole
        self._requested = asyncio.Event()
        self._tried = -1  # version of the last attempt
        self._wrote = asyncio.Event()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due, by steps, by time, or because `soon` asks for one. Time counts from the
        first call."""
        now = asyncio.get_running_loop().time()
        if self._ended_at is None:
            self._ended_at = now
        by_steps = self._config.interval > 0 and step % self._config.interval == 0
        by_time = self._config.interval_s > 0 and now - self._ended_at >= self._wait_s
        return by_steps or (by_time and self._copy is None) or self._requested.is_set()

    async def soon(self) -> None:
        """Ask for a checkpoint at the loop's next opportunity, and wait until it is written, or is skipped because the
        disk is full. Return at once if the version is already saved."""
        version = self._run.version
        self._tried = -1  # there may be room by now
        while max(self._saved, self._tried) < version:
            self._wrote.clear()
            self._requested.set()
            await self._wrote.wait()

    async def requested_before(self, waiting: asyncio.Future[Any]) -> bool:
        """Wait until `soon` asks for a checkpoint or `waiting` is done. Return whether the checkpoint came first."""
        requested = asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait([waiting, requested], return_when=asyncio.FIRST_COMPLETED)
        finally:
            requested.cancel()
        return not waiting.done()

    async def begin(self, background: asyncio.TaskGroup) -> None:
        """Copy the run's version once the previous checkpoint is whole, and write it in the background if the disk has
        room.

        Raises:
            CheckpointError: The state cannot be copied.
        """
        await self.written()
        self._requested.clear()
        version = self._run.version
        if self._saved == version:
            return
        try:
            copy = await self._calls.finish(self._copy_run())
        except NoSpaceError as error:
            self._skip(version, error)
        else:
            self._writing = background.create_task(self._write(copy), name=f"checkpoint-{version}")

    async def written(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def save_last(self) -> None:
        """Save the run's version if it is not saved yet, however long that takes, and report it.

        Raises:
            CheckpointError: The version cannot be saved.
        """
        version = self._run.version
        try:
            if self._saved != version:
                await self._write_last(version)
        finally:
            self._note_tried(version)

    async def _write_last(self, version: int) -> None:
        path = step_directory(self._root, version)
        size = self._size()
        self._progress.message(f"saving step {version}, {gigabytes(size)}, to {path}")
        writing = asyncio.ensure_future(self._copy_and_finish())
        try:
            while not (await asyncio.wait([writing], timeout=REPORT_EVERY_S))[0]:
                written = sum(map(size_of, being_written(self._root, path.name)))
                self._progress.message(f"saving step {version}: {gigabytes(written)} of {gigabytes(size)} are written")
        finally:
            writing.cancel()
        await writing
        self._progress.message(f"step {version} is saved")

    async def _copy_and_finish(self) -> None:
        copy = self._copy
        if copy is None or copy.version != self._run.version:  # otherwise it was copied before the run was stopped
            copy = await self._copy_run()
        await self._finish(copy)

    async def _write(self, copy: _Copy) -> None:
        """Write a copy. A full disk is reported; any other failure fails the background task group."""
        with (
            self._progress.working(f"writing the checkpoint of step {copy.version}"),
            span("checkpoint", "checkpoint", lane="checkpoint", step=copy.version),
        ):
            try:
                await self._finish(copy)
            except NoSpaceError as error:
                self._copy = None
                self._skip(copy.version, error)
            finally:
                self._note_tried(copy.version)

    async def _copy_run(self) -> _Copy:
        require_room(self._root, self._size())
        began_at, version = asyncio.get_running_loop().time(), self._run.version
        self._copy = _Copy(version, await self._run.copy_state(), began_at)
        return self._copy

    async def _finish(self, copy: _Copy) -> None:
        try:
            await self._calls.trainer.finish_save()
            if not is_complete(self._root, copy.version):
                await in_thread(complete, self._root, copy.version, copy.run_state)
        except NoSpaceError as error:  # another process has used the space meanwhile
            raise NoSpaceError(no_space(self._root, self._size(), free_bytes(self._root))) from error
        finally:
            self._ended_at = asyncio.get_running_loop().time()
        self._wait_s = max(self._config.interval_s, (self._ended_at - copy.began_at) * (1 / SHARE - 1))
        self._saved, self._copy = copy.version, None
        keep_last(self._root, self._config.keep)
        self._run.forget_before(min(map(step_of, list_checkpoints(self._root)), default=0))

    def _skip(self, version: int, error: NoSpaceError) -> None:
        self._ended_at = asyncio.get_running_loop().time()
        kept = f"the last is that of step {self._saved}" if self._saved else "there is none yet"
        self._progress.warning(f"no checkpoint of step {version}: {error}; {kept}, and training continues")
        self._note_tried(version)

    def _note_tried(self, version: int) -> None:
        """Wake up the tasks that wait for a version, which is now saved or cannot be saved."""
        self._tried = version
        self._wrote.set()

    def _size(self) -> int:
        """Size of a checkpoint in bytes, taken from the newest one."""
        checkpoints = list_checkpoints(self._root)
        return size_of(checkpoints[-1]) if checkpoints else self._estimate


@dataclass(frozen=True, slots=True)
class Resumption:
    """Starting point of a run."""

    checkpoint: Path | None  # None if there is none yet: training begins with the groups of the journal
    state: RunState
    losses: tuple[str, ...] = ()  # messages for the user
    journal: JournalContents | None = None  # None for a new run

    async def load(self, trainer: Trainer, progress: Progress) -> None:
        """Have the trainer load the checkpoint, if there is one.

        Raises:
            CheckpointError: The run state in the checkpoint is that of another version.
        """
        if self.checkpoint is None:
            return
        with progress.working(f"loading {self.checkpoint}"):
            version = await trainer.load(self.checkpoint)
        if version != self.state.step:
            raise CheckpointError(
                f"{self.checkpoint} has weights of version {version} and the run's state of step {self.state.step}; "
                "move it away to continue from the previous one"
            )
        progress.message(f"continuing from {self.checkpoint}")


@dataclass(frozen=True, slots=True)
class Standing:
    """State on the disk of a stopped run."""

    checkpoint: Path | None  # the newest one that is whole
    damaged: Mapping[Path, str]  # newer checkpoints that are damaged, each with a description of the damage
    state: RunState
    journal: JournalContents
    lost_records: Sequence[str] = ()  # messages about lost metrics and transcripts
    notes: tuple[str, ...] = ()  # other messages for the user

    @property
    def losses(self) -> list[str]:
        """Messages for the user about damaged or lost files, before the run resumes."""
        aside = [
            f"{complaint}; the run continues from {self.checkpoint}, which is older"
            for complaint in self.damaged.values()
        ]
        return [*self.notes, *aside, *self.journal.losses, *self.lost_records]


def find_standing(config: RunConfig, run_dir: RunDirectory) -> Standing:
    """Find the newest whole checkpoint, and check that the run can resume from it. The run is left unchanged.

    Raises:
        ConfigError: A setting that determines weights or rollouts has changed since the run began.
        CheckpointError: The run is finished, its state cannot be read or is of other tasks, all its checkpoints are
            damaged, its journal is of another run, or `model.path` holds another model than the run began with.
    """
    checkpoint, damaged = newest_complete(run_dir.checkpoints)
    state = RunState.read(checkpoint or run_dir.path)
    check_unchanged(config, state.settings, source=run_dir.config)
    notes = _check_model(config, state, checkpoint)
    if state.tasks:
        _check_mix(config, state, checkpoint or run_dir.path)
    if is_finished(config, run_dir, checkpoint):
        raise CheckpointError(
            f"{run_dir.path} has trained all its {state.step} steps; give it more with "
            f"--training.steps {2 * state.step}"
        )
    journal = read_segments(list_segments(run_dir.journal), state.position)
    transcripts = config.logging.transcripts_per_step > 0 and not run_dir.supervised.is_file()
    lost = run_dir.lost_records(state.step, transcripts=transcripts)
    return Standing(checkpoint, damaged, state, journal, lost, notes)


def resume_from_newest(config: RunConfig, run_dir: RunDirectory) -> Resumption:
    """Prepare a run to resume from its newest whole checkpoint: cut metrics and transcripts back to its step, rename
    damaged checkpoints, and write the config. A run that cannot resume is left unchanged.

    Raises:
        ConfigError, CheckpointError: The run cannot resume; see `find_standing`.
    """
    standing = find_standing(config, run_dir)
    checkpoint, state, journal = standing.checkpoint, standing.state, standing.journal
    losses = [*standing.notes, *(_set_aside(path, complaint) for path, complaint in standing.damaged.items())]
    losses += standing.lost_records
    if checkpoint is None and not journal.begins and not journal.losses:
        losses.append(f"{run_dir.path} has no checkpoint and no journal: the run starts from the beginning")
    # Without a checkpoint, the first validation is also repeated.
    run_dir.cut_records(state.step if checkpoint is not None else -1, journal.state)
    run_dir.write_config(config)
    return Resumption(checkpoint, state, tuple(losses), journal)


def _check_model(config: RunConfig, state: RunState, checkpoint: Path | None) -> tuple[str, ...]:
    """Check that the model's folder has not changed since the run began.

    Returns:
        Messages for the user. Changed weights are no error if the weights of the checkpoint are sufficient.

    Raises:
        CheckpointError: A part of the model that the run needs has changed.
    """
    path = config.model.path
    if not (changed := changed_parts(Path(path), state.model)):
        return ()
    needs_base = config.training.kl_coef or config.training.adapter.is_on
    if changed == ["weights"] and checkpoint is not None and not needs_base:
        return (f"model.path = {path!r} has other weights than the run began with; those of {checkpoint} are used",)
    needed_for = ""
    if "weights" in changed:
        needed_for = (
            ", and the run has no checkpoint to continue from"
            if checkpoint is None
            else ", and training.adapter changes those weights"
            if config.training.adapter.is_on
            else f", and training.kl_coef = {config.training.kl_coef:g} holds the policy to them"
        )
    raise CheckpointError(
        f"model.path = {path!r} is not the initial model of the run: {', '.join(changed)} changed{needed_for}; "
        "restore that model, name a folder that has it with --model.path FOLDER, or start a new run"
    )


def _check_mix(config: RunConfig, state: RunState, folder: Path) -> None:
    try:
        MixState.from_json(state.tasks, [source.name for source in config.tasks])
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def is_finished(config: RunConfig, run_dir: RunDirectory, newest: Path | None = None) -> bool:
    """Return whether a run is finished: its newest checkpoint has all steps, and the policy was exported after it. The
    checkpoint alone is not enough, because a run may be stopped in its last validation.

    Args:
        newest: Newest checkpoint that is whole, if others may be damaged.
    """
    newest = newest or latest(run_dir.checkpoints)
    if newest is None or step_of(newest) < config.training.steps:
        return False
    export = run_dir.export
    return export.exists() and export.stat().st_mtime >= newest.stat().st_mtime


def newest_complete(root: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest undamaged checkpoint, or None if there is no checkpoint, and the damage of each newer one.

    Raises:
        DamagedCheckpointError: The folder has checkpoints, but all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(list_checkpoints(root)):
        try:
            verify(checkpoint)
            _check_step(checkpoint)
        except DamagedCheckpointError as error:
            damaged[checkpoint] = str(error)
        else:
            return checkpoint, damaged
    if damaged:
        raise DamagedCheckpointError(
            f"no checkpoint in {root} is whole: {'; '.join(damaged.values())}; restore one, or start a new run"
        )
    return None, damaged


def _check_step(checkpoint: Path) -> None:
    """Check that a checkpoint's folder has the name of its step.

    Raises:
        DamagedCheckpointError: The folder holds another step than its name says.
        CheckpointError: The step cannot be read.
    """
    step = RunState.read(checkpoint).step
    if step != step_of(checkpoint):
        raise DamagedCheckpointError(f"{checkpoint} is damaged: it holds step {step}, which does not match its name")


def _set_aside(checkpoint: Path, complaint: str) -> str:
    """Rename a damaged checkpoint, so that it does not count as one of the newest, which are kept. Return a message
    about it."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        checkpoint.rename(aside)
    except OSError as error:
        return f"{complaint}; an older checkpoint takes its place ({checkpoint} cannot be renamed: {error.strerror})"
    return f"{complaint}; an older checkpoint takes its place, and this one is now {aside}"
