"""Where a stopped run goes on: the checkpoint, and its files cut back to it. Done before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan_rl.config.changes import check_unchanged
from titan_rl.config.run import RunConfig
from titan_rl.durability.run_state import RunState
from titan_rl.errors import CheckpointError
from titan_rl.observability.run_dir import RunDirectory
from titan_rl.training.checkpoint import latest


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a run goes on from."""

    checkpoint: Path | None  # None: there is none yet, and training begins anew with what the journal has
    state: RunState


def resume_from_newest(config: RunConfig, run_dir: RunDirectory) -> Resumption:
    """Find the newest checkpoint, take what is played again out of metrics and transcripts, and keep the config.

    Raises:
        ConfigError: a setting that weights and rollouts come from has changed since.
        CheckpointError: the run is finished, or its state cannot be read.
    """
    checkpoint = latest(run_dir.checkpoints)
    state = RunState.read(checkpoint or run_dir.path)
    check_unchanged(config, state.settings, source=run_dir.config)
    if state.step >= config.training.steps and _is_exported(run_dir, checkpoint):
        raise CheckpointError(
            f"{run_dir.path} has trained all its {state.step} steps; give it more with "
            f"--training.steps {2 * state.step}"
        )
    # Without a checkpoint the first validation is made again, too.
    run_dir.cut_records(state.step if checkpoint is not None else -1)
    run_dir.write_config(config)
    return Resumption(checkpoint, state)


def _is_exported(run_dir: RunDirectory, checkpoint: Path | None) -> bool:
    """Whether the run went on to its end after its newest checkpoint; it may have been stopped in the last
    validation."""
    export = run_dir.export
    return checkpoint is None or (export.exists() and export.stat().st_mtime >= checkpoint.stat().st_mtime)
