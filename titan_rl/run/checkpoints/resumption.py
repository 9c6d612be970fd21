"""Resumption of a stopped run: find its checkpoint and cut its files back to it, before any process starts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_rl.config.changes import check_unchanged
from titan_rl.config.model_files import changed_parts
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import CheckpointError, DamagedCheckpointError
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.state import JournalContents, RunState, list_segments, read_segments
from titan_rl.scheduling.task_mix import Position
from titan_rl.training.state.checkpoint import list_checkpoints, step_of, verify


@dataclass(frozen=True, slots=True)
class Resumption:
    """Starting point of a run."""

    checkpoint: Path | None  # None: there is none yet, and training begins with the groups of the journal
    state: RunState
    losses: tuple[str, ...] = ()  # messages for the user
    journal: JournalContents | None = None  # None for a new run

    def loaded(self, version: int) -> None:
        """Check the version that the trainer reports after it has loaded the checkpoint.

        Raises:
            CheckpointError: the checkpoint has the run's state of another version.
        """
        if version != self.state.step:
            raise CheckpointError(
                f"{self.checkpoint} has weights of version {version} and the run's state of step {self.state.step}; "
                "move it away to continue from the previous one"
            )


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a stopped run on the disk."""

    checkpoint: Path | None  # the newest that is whole
    damaged: Mapping[Path, str]  # newer ones, with the damage
    state: RunState
    journal: JournalContents
    lost_records: Sequence[str] = ()  # of metrics and transcripts
    told: tuple[str, ...] = ()  # other messages for the user

    @property
    def losses(self) -> list[str]:
        """Messages for the user about damaged or lost files, before the run resumes."""
        aside = [
            f"{complaint}; the run continues from {self.checkpoint}, which is older"
            for complaint in self.damaged.values()
        ]
        return [*self.told, *aside, *self.journal.losses, *self.lost_records]


def find_standing(config: RunConfig, run_dir: RunDirectory) -> Standing:
    """Find the newest whole checkpoint, and check that the run can resume from it. The run is left unchanged.

    Raises:
        ConfigError: a setting that weights and rollouts come from has changed since.
        CheckpointError: the run is finished, its state cannot be read or is of other tasks, all its checkpoints are
            damaged, its journal is of another run, or `model.path` holds another model than the run began with.
    """
    checkpoint, damaged = newest_whole(run_dir.checkpoints)
    state = RunState.read(checkpoint or run_dir.path)
    check_unchanged(config, state.settings, source=run_dir.config)
    told = _check_model(config, state, checkpoint)
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
    return Standing(checkpoint, damaged, state, journal, lost, told)


def resume_from_newest(config: RunConfig, run_dir: RunDirectory) -> Resumption:
    """Cut metrics and transcripts back to the step that the run resumes from, and write the config. Damaged checkpoints
    are renamed. A run that cannot resume is left unchanged.

    Raises:
        ConfigError, CheckpointError: as `find_standing` does.
    """
    stands = find_standing(config, run_dir)
    checkpoint, state, journal = stands.checkpoint, stands.state, stands.journal
    losses = [*stands.told, *(_set_aside(path, complaint) for path, complaint in stands.damaged.items())]
    losses += stands.lost_records
    if checkpoint is None and not journal.begins and not journal.losses:
        losses.append(f"{run_dir.path} has no checkpoint and no journal: the run starts from the beginning")
    # Without a checkpoint the first validation is made again, too.
    run_dir.cut_records(state.step if checkpoint is not None else -1, journal.state)
    run_dir.write_config(config)
    return Resumption(checkpoint, state, tuple(losses), journal)


def _check_model(config: RunConfig, state: RunState, checkpoint: Path | None) -> tuple[str, ...]:
    """Check that the model's folder has not changed since the run began.

    Returns:
        messages for the user. Changed weights are no error if the weights of the checkpoint are enough.

    Raises:
        CheckpointError: a part of the model that the run needs has changed.
    """
    path = config.model.path
    if not (changed := changed_parts(Path(path), state.model)):
        return ()
    if changed == ["weights"] and checkpoint is not None and not config.training.kl_coef:
        return (f"model.path = {path!r} has other weights than the run began with; those of {checkpoint} are used",)
    needed_for = ""
    if "weights" in changed:
        needed_for = (
            ", and the run has no checkpoint to continue from"
            if checkpoint is None
            else f", and training.kl_coef = {config.training.kl_coef:g} holds the policy to them"
        )
    raise CheckpointError(
        f"model.path = {path!r} is not the model that the run began with: {', '.join(changed)} changed{needed_for}; "
        "put that model back, name a folder that has it with --model.path FOLDER, or begin a new run"
    )


def _check_mix(config: RunConfig, state: RunState, folder: Path) -> None:
    try:
        Position.from_json(state.tasks, [source.name for source in config.tasks])
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def is_finished(config: RunConfig, run_dir: RunDirectory, newest: Path | None) -> bool:
    """Return whether a run is finished: its newest checkpoint has all steps, and the policy was exported after it. A
    run may also be stopped in its last validation."""
    if newest is None or step_of(newest) < config.training.steps:
        return False
    export = run_dir.export
    return export.exists() and export.stat().st_mtime >= newest.stat().st_mtime


def newest_whole(root: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest undamaged checkpoint, or None if there is no checkpoint, and the damage of newer ones.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all are damaged.
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
            f"no checkpoint in {root} is whole: {'; '.join(damaged.values())}; put one back, or begin a new run"
        )
    return None, damaged


def _check_step(checkpoint: Path) -> None:
    """
    Raises:
        DamagedCheckpointError: the folder is named after another step than it holds.
        CheckpointError: its step cannot be read.
    """
    step = RunState.read(checkpoint).step
    if step != step_of(checkpoint):
        raise DamagedCheckpointError(f"{checkpoint} is damaged: it holds step {step}, and is named after another")


def _set_aside(checkpoint: Path, complaint: str) -> str:
    """Rename a damaged checkpoint, so that it does not count among the newest that are kept, and return the message
    about it."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        checkpoint.rename(aside)
    except OSError as error:
        return f"{complaint}; an older checkpoint takes its place ({checkpoint} cannot be renamed: {error.strerror})"
    return f"{complaint}; an older checkpoint takes its place, and this one is now {aside}"
