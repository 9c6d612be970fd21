"""Policy sources: resolution of a run, a checkpoint, an adapter, a model or a TOML file to a policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from titan_rl.config.model_folder import check_adapter_weights
from titan_rl.core.errors import ConfigError
from titan_rl.run.directory import adapters_of_run
from titan_rl.run.held_out import best_of
from titan_rl.training.models.peft_settings import CONFIG as ADAPTER_FILE
from titan_rl.training.models.peft_settings import peft_settings, read_adapter_config
from titan_rl.training.state.checkpoint import latest, step_of


@dataclass(frozen=True, slots=True)
class PolicySource:
    """Source of a policy: its settings and its weights.

    Attributes:
        name: Name in messages, such as "step 80 of runs/latest".
        toml: File of the policy's settings, if it has any.
        folder: Folder of the model; None if the settings name it.
        checkpoint: Checkpoint of a run, whose weights replace the model's own, or adapter in PEFT's format, which is
            merged into the model's weights.
        version: Number of steps for which a run has trained the policy.
        run: Folder of the run, without links, if the policy is the run's newest one, so that newer ones may follow.
    """

    name: str
    toml: Path | None = None
    folder: Path | None = None
    checkpoint: Path | None = None
    version: int = 0
    run: Path | None = None


def find_policy(given: str) -> PolicySource:
    """Find the newest policy of a run's folder, the policy of a checkpoint, of a Hugging Face folder or of an adapter
    in PEFT's format, or the policy that a TOML file names.

    Raises:
        ConfigError: The path is none of these. The message says what is wrong with it.
    """
    path = Path(given)
    if path.is_file():
        if path.suffix != ".toml":
            raise ConfigError(f"{given} is a file; name a run's folder, a model's folder or a TOML file")
        return PolicySource(f"the model of {given}", toml=path)
    if (path / "config.toml").is_file():
        return _newest_of_run(path)
    if (path / "run_state.json").is_file():
        return _of_checkpoint(path)
    if (path / "config.json").is_file():
        return PolicySource(f"the model {given}", folder=path.resolve())
    if (path / ADAPTER_FILE).is_file():
        return _of_adapter(path)
    if not path.exists():
        kind = "file" if path.suffix == ".toml" else "folder"
        raise ConfigError(
            f"{given}: there is no such {kind}; name a run's folder such as runs/latest, a model's folder, or a TOML "
            "file. From the Hugging Face hub: hf download ORGANIZATION/NAME --local-dir FOLDER"
        )
    raise ConfigError(
        f"{given} is neither a run's folder, which has a config.toml, nor a model's, which has a config.json, nor a "
        f"checkpoint's, which has a run_state.json, nor an adapter's, which has an {ADAPTER_FILE}"
        + (f"; {path / 'latest'} is a run's" if (path / "latest" / "config.toml").is_file() else "")
    )


def single_policy(run: Path) -> Path:
    """Find the folder of the only policy of a run: the run's own folder, or that of its only adapter once its training
    has begun.

    Raises:
        ConfigError: The run trains several adapters. The message lists their folders.
    """
    adapters = adapters_of_run(run)
    if len(adapters) == 1 and (only := next(iter(adapters.values()))).is_dir():
        return only
    if len(adapters) > 1:
        raise ConfigError(
            f"{run} is a run of several adapters, each of which is a policy; name one of them: "
            f"{', '.join(str(folder) for folder in adapters.values())}"
        )
    return run


def _newest_of_run(run: Path) -> PolicySource:
    run = single_policy(run)
    toml, export, newest = run / "config.toml", run / "export", newest_checkpoint(run)
    if newest is None and not export.is_dir():
        name = f"the initial model of {run}, which has no saved step yet"
        return PolicySource(name, toml=toml, run=run.resolve())
    saved_at = 0.0 if newest is None or newest.checkpoint is None else newest.checkpoint.stat().st_mtime
    if newest is None or (export.is_dir() and export.stat().st_mtime >= saved_at):
        version = 0 if newest is None else newest.version
        return PolicySource(
            f"the exported policy of {run}", toml=toml, folder=export.resolve(), version=version, run=run.resolve()
        )
    return replace(newest, run=run.resolve())


def newest_checkpoint(run: Path, *, best: bool = False) -> PolicySource | None:
    """Find the policy of a run's newest checkpoint; None if the run has no checkpoint.

    Args:
        best: Whether to find the checkpoint with the highest held-out reward instead.

    Raises:
        ConfigError: The run has checkpoints, and none of them was validated, or the initial model is the best policy.
        CheckpointError: The rewards in the newest checkpoint cannot be read.
    """
    checkpoint = latest(run / "checkpoints")
    if best and checkpoint is not None:
        if (found := best_of(run / "checkpoints")) is None:
            raise ConfigError(
                f"no checkpoint of {run} was validated, so that none is the best: a run needs validation.interval and "
                'checkpoint.keep = "best" for that. Leave --best out to export the newest one'
            )
        checkpoint, reward = found
        if checkpoint is None:
            raise ConfigError(
                f"no step of {run} is better than its initial model, which has the validation reward {reward:.3f}: use "
                "model.path of its config.toml, or leave --best out to export the newest step"
            )
    return None if checkpoint is None else _of_step(checkpoint, run, str(run))


def _of_step(checkpoint: Path, run: Path, run_name: str) -> PolicySource:
    step = step_of(checkpoint)
    name = f"step {step} of {run_name}"
    return PolicySource(name, toml=run / "config.toml", checkpoint=checkpoint.resolve(), version=step)


def _of_checkpoint(checkpoint: Path) -> PolicySource:
    """Find the policy of a checkpoint. Its settings are those of its run, two folders above it."""
    run = checkpoint.resolve().parents[1]
    if not (run / "config.toml").is_file():
        raise ConfigError(
            f"{checkpoint} is a checkpoint outside its run; put it into RUN/checkpoints of a run's folder"
        )
    return _of_step(checkpoint.resolve(), run, run.name)


def _of_adapter(adapter: Path) -> PolicySource:
    """Find the policy of an adapter in PEFT's format. Its base is the model that the adapter's settings name."""
    given = read_adapter_config(adapter, str(adapter)).get("base_model_name_or_path")
    if not isinstance(given, str) or not (base := Path(given).expanduser()).is_dir():
        raise ConfigError(
            f"{adapter} is an adapter of base_model_name_or_path = {given!r}, which is not a folder; change it in "
            f"{adapter / ADAPTER_FILE} to the folder of that model"
        )
    check_adapter_weights(adapter, base, peft_settings(adapter).rank, str(adapter), None)
    return PolicySource(f"the adapter {adapter}", folder=base.resolve(), checkpoint=adapter.resolve())
