"""Beginning of a run, and its resumption from the newest checkpoint that is whole."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from titan_rl.config.resume_changes import check_schedule, check_unchanged, is_resumable, settings_of, shown_name
from titan_rl.config.run import RunConfig
from titan_rl.config.run_inputs import (
    DRAFTER,
    Inputs,
    changed_code,
    changed_data,
    changed_models,
    inputs_of,
    model_folders,
    settings_of_inputs,
)
from titan_rl.core.errors import CheckpointError, ConfigError, DamagedCheckpointError
from titan_rl.core.run_files import ADAPTERS
from titan_rl.run.checks.requirements import check_room, size_of
from titan_rl.run.directory import RunDirectory, check_files
from titan_rl.run.held_out import reason_to_stop
from titan_rl.run.journal.state import FILE, JournalContents, RunState, list_segments, read_segments
from titan_rl.run.observability.progress import Progress
from titan_rl.scheduling.task_mix import MixState
from titan_rl.training.settings import StopAtConfig
from titan_rl.training.state.checkpoint import latest, list_checkpoints, step_of, verify
from titan_rl.training.trainer_protocol import Trainer


def open_run_dir(
    config: RunConfig, resume: Path | None, name: str | None = None, *, supervised: bool = False
) -> RunDirectory:
    """Open the folder of the run to resume, or create a new folder.

    Args:
        supervised: Whether this is a run of `titan-rl sft`.

    Raises:
        ConfigError: The folder cannot be created or written to, has a run of the other command, or is on a disk without
            room for the run.
    """
    if resume is None:
        check_room(config, Path(config.run_dir))
        return RunDirectory.create(config, name)
    if not os.access(resume, os.W_OK | os.X_OK):
        raise ConfigError(f"--resume {resume}: the run cannot continue in a folder that is not writable; copy it")
    check_files(resume)
    check_room(config, resume, held=size_of(resume / "checkpoints"))
    run_dir = RunDirectory(resume)
    if run_dir.supervised.is_file() != supervised:
        command = "train" if supervised else "sft"
        raise ConfigError(f"--resume {resume}: that is a run of titan-rl {command}; resume it with titan-rl {command}")
    return run_dir


@dataclass(frozen=True, slots=True)
class Resumption:
    """Starting point of a run."""

    checkpoint: Path | None  # None if there is none yet: training begins with the groups of the journal
    state: RunState
    losses: tuple[str, ...] = ()  # messages for the user
    journal: JournalContents | None = None  # None for a new run
    damaged: Mapping[Path, str] = field(default_factory=dict[Path, str])  # newer checkpoints, with their damage
    changes: tuple[str, ...] = ()  # inputs of the run that have changed since the checkpoint, for the run's page

    @property
    def all_losses(self) -> list[str]:
        """Messages for the user about damaged or lost files, before the run resumes."""
        aside = [
            f"{damage}; the run continues from {self.checkpoint}, which is older" for damage in self.damaged.values()
        ]
        return [*self.losses, *aside, *(self.journal.losses if self.journal is not None else ())]

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


def begin_run(config: RunConfig, run_dir: RunDirectory) -> Resumption:
    """Write the initial state of a new run, and return it."""
    start = Resumption(None, RunState(settings=settings_of(config), run=uuid4().hex, inputs=inputs_of(config)))
    start.state.write(run_dir.path)
    return start


def find_resumption(config: RunConfig, run_dir: RunDirectory) -> Resumption:
    """Find the newest whole checkpoint, and check that the run can resume from it. The run is left unchanged.

    Raises:
        ConfigError: A setting that determines weights or rollouts has changed since the run began.
        CheckpointError: The run is finished, its state cannot be read or is of other tasks, all its checkpoints are
            damaged, its journal is of another run, or the run would read other models or data than before.
    """
    checkpoint, damaged = newest_complete(run_dir.checkpoints)
    state = RunState.read(checkpoint or run_dir.path)
    is_sft = run_dir.supervised.is_file()
    fix = "" if is_sft else f"{new_run_command(run_dir.path)} begins a new run from the weights of this one"
    check_unchanged(config, state.settings, source=run_dir.config, inputs=settings_of_inputs(state.inputs), fix=fix)
    now = inputs_of(config)
    notes = _check_models(config, state, checkpoint)
    changes = (*_check_data(config, state, now), *changed_code(now, state.inputs))
    if state.tasks:
        _check_mix(config, state, checkpoint or run_dir.path)
    is_adapter = run_dir.path.parent.name == ADAPTERS
    check_schedule(config, state.settings, f"adapters.{run_dir.path.name}.training" if is_adapter else "training")
    if is_finished(config, run_dir, checkpoint):
        if state.step < config.training.steps and checkpoint is not None:
            raise CheckpointError(
                f"{run_dir.path} stopped at step {state.step}: {_stopped_early(config, checkpoint)}; to continue, "
                "raise the limit, or set it to none: --training.stop_at.reward none --training.stop_at.patience none"
            )
        raise CheckpointError(
            f"{run_dir.path} has trained all its {state.step} steps; give it more with "
            f"{_more_steps(config, 'training')}"
        )
    journal = read_segments(list_segments(run_dir.journal), state.position)
    transcripts = config.logging.transcripts_per_step > 0 and not is_sft
    lost = run_dir.lost_records(state.step, transcripts=transcripts)
    models = {**now["models"], **state.inputs.get("models", {})}  # of an earlier moment, if they may differ
    state = replace(state, inputs={**now, "models": models})
    return Resumption(checkpoint, state, (*notes, *changes, *lost), journal, damaged, changes)


def resume_from_newest(config: RunConfig, run_dir: RunDirectory) -> Resumption:
    """Prepare a run to resume from its newest whole checkpoint: cut metrics and transcripts back to its step, rename
    damaged checkpoints, and write the config. A run that cannot resume is left unchanged.

    Raises:
        ConfigError, CheckpointError: The run cannot resume; see `find_resumption`.
    """
    start = find_resumption(config, run_dir)
    checkpoint, journal = start.checkpoint, start.journal
    assert journal is not None
    losses = [*start.losses, *(_set_aside(path, damage) for path, damage in start.damaged.items())]
    if checkpoint is None and not journal.begins and not journal.losses:
        losses.append(f"{run_dir.path} has no checkpoint and no journal: the run starts from the beginning")
    # Without a checkpoint, the first validation is also repeated.
    run_dir.cut_records(start.state.step if checkpoint is not None else -1, journal.state)
    run_dir.write_config(config)
    return replace(start, losses=tuple(losses))


def new_run_command(run: Path, options: Sequence[tuple[str, str]] = ()) -> str:
    """Command that begins a new run from the weights of another one."""
    return shlex.join(["titan-rl", "train", "--from", str(run), *(f"--{key}={value}" for key, value in options)])


def _more_steps(config: RunConfig, table: str) -> str:
    """Options that give a finished run more steps, without a jump of its learning rate."""
    training = config.training
    schedule = training.lr_decay != "constant" and training.decay_steps is None
    more = f"--{table}.steps {2 * training.steps}"
    return f"{more} --{table}.decay_steps {training.steps} (at the last learning rate)" if schedule else more


def _check_models(config: RunConfig, state: RunState, checkpoint: Path | None) -> list[str]:
    """Check that the models that a run reads have not changed since it began.

    Returns:
        Messages for the user. Changed weights are not an error if the weights of the checkpoint are sufficient.

    Raises:
        CheckpointError: A part of a model that the run needs has changed.
    """
    folders, notes, now = model_folders(config), list[str](), settings_of(config)
    for key, before in state.settings.items():
        if key.endswith("teacher") and "://" in f"{before} {now.get(key)}" and now.get(key) != before:
            notes.append(f"{key} = {now.get(key)!r} is another teacher than {before!r}, with which the run began")
    for key, changed in changed_models(config, state.inputs).items():
        shown, what = shown_name(config, key), ", ".join(changed)
        where = f"{shown} = {folders[key]!r}"
        is_initial = key == "model.path" or key.endswith("training.adapter.start")
        needed_for = ""
        if is_initial:
            needed_for = _needed_for(config, key, checkpoint)
            if changed == ["weights"] and not needed_for:
                notes.append(f"{where} has other weights than the run began with; those of {checkpoint} are used")
                continue
        elif key == DRAFTER or (is_resumable(key) and folders[key] != state.inputs["models"][key].get("folder")):
            notes.append(f"{where} is another model than before: {what} changed")
            continue
        kind = "model" if key == "model.path" else "adapter"
        noun = f"the initial {kind} of the run" if is_initial else "the model that the run began with"
        raise CheckpointError(
            f"{where} is not {noun}: {what} changed{needed_for if 'weights' in changed else ''}; restore that model, "
            f"name a folder that has it with --{shown} FOLDER, or start a new run"
        )
    return notes


def _needed_for(config: RunConfig, key: str, checkpoint: Path | None) -> str:
    """Reason why a run needs the weights of a folder from which it began, for a message; "" if it does not."""
    training = config.training
    if checkpoint is None:
        return ", and the run has no checkpoint to continue from"
    if training.adapter.is_on and key == "model.path":
        return ", and training.adapter changes those weights"
    return f", and training.kl_coef = {training.kl_coef:g} holds the policy to them" if training.kl_coef else ""


def _check_data(config: RunConfig, state: RunState, now: Inputs) -> list[str]:
    """Check that the files of tasks have not changed since the checkpoint.

    Returns:
        Messages for the user about files that differ.

    Raises:
        CheckpointError: A task's data changed, and `checkpoint.allow_changed_data` is not set.
    """
    data, others = changed_data(now, state.inputs, config)
    if data and not config.checkpoint.allow_changed_data:
        raise CheckpointError(
            f"the run was trained on other data: {'; '.join(data)}. Samples are chosen by their position, so it would "
            "train on rows twice or never; restore the data, or continue with the new data from the same position with "
            "--checkpoint.allow_changed_data true"
        )
    return [f"{change}; the run continues with the new content" for change in (*data, *others)]


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
    if newest is None or (step_of(newest) < config.training.steps and _stopped_early(config, newest) is None):
        return False
    export = run_dir.export
    return export.exists() and export.stat().st_mtime >= newest.stat().st_mtime


def _stopped_early(config: RunConfig, newest: Path) -> str | None:
    """Reason for which a run has ended before its last step; None if it has not."""
    stop_at = config.training.stop_at
    return reason_to_stop(stop_at, RunState.read(newest).held_out) if stop_at != StopAtConfig() else None


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


def check_resumption(config: RunConfig, resume: Path, *, supervised: bool = False) -> list[str]:
    """Check that a run can resume with a config, and return messages about data that it has lost. The run is left
    unchanged.

    Args:
        supervised: Whether this is a run of `titan-rl sft`.

    Raises:
        ConfigError, CheckpointError: The run cannot resume.
    """
    run_dir = open_run_dir(config, resume, supervised=supervised)
    with run_dir.locked():
        if not config.adapters:
            return find_resumption(config, run_dir).all_losses
        found = find_resumptions(config, run_dir)
        return [f"{name}: {loss}" for name, start in found.items() for loss in start.all_losses]


def find_resumptions(config: RunConfig, run_dir: RunDirectory) -> dict[str, Resumption]:
    """Find the starting points of the unfinished adapters of a run that have begun, by name; see `find_resumption`.

    Raises:
        ConfigError, CheckpointError: The run, or one of its adapters, cannot resume.
    """
    state = RunState.read(run_dir.path)
    check_unchanged(config, state.settings, source=run_dir.config, inputs=settings_of_inputs(state.inputs))
    check_unfinished(config, run_dir)
    started = _started_adapters(config, run_dir)
    return {each.name: find_resumption(each, folder) for each, folder in started if not is_finished(each, folder)}


def check_unfinished(config: RunConfig, run_dir: RunDirectory) -> None:
    """Check that at least one of the adapters of a run has steps left.

    Raises:
        CheckpointError: All adapters are finished.
    """
    started = _started_adapters(config, run_dir)
    if len(started) == len(config.adapters) and all(is_finished(each, folder) for each, folder in started):
        first, _ = started[0]
        raise CheckpointError(
            f"{run_dir.path}: all adapters have trained all their steps; give one of them more, for example with "
            f"{_more_steps(first, f'adapters.{first.name}.training')}"
        )


def _started_adapters(config: RunConfig, run_dir: RunDirectory) -> list[tuple[RunConfig, RunDirectory]]:
    """List the adapters that have begun, and check that the folder of each one that has been trained is whole.

    Raises:
        ConfigError: An adapter's folder is not a folder, or has links.
        CheckpointError: The folder of an adapter that has been trained is gone or has no state.
    """
    started: list[tuple[RunConfig, RunDirectory]] = []
    for name, each in config.experiments.items():
        folder = run_dir.path / ADAPTERS / name
        if folder.exists():
            check_files(folder)
        if (folder / FILE).is_file():
            started.append((each, RunDirectory(folder)))
            continue
        steps = run_dir.last_metric(f"adapter/{name}/step") or max(
            map(step_of, list_checkpoints(folder / "checkpoints")), default=0
        )
        is_emptied = folder.is_dir() and not any(folder.iterdir())
        if steps and not is_emptied:
            lacks = f"{folder} has no {FILE}" if folder.exists() else f"{folder} is gone"
            raise CheckpointError(
                f"{lacks}, and the run has trained {steps:g} steps of adapter {name!r}; restore the folder, or replace "
                "it by an empty one to train that adapter from step 0"
            )
    return started
