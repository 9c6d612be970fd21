"""A policy written for good."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from titan_rl.config.make_renderer import told_of_template
from titan_rl.config.serve import load_serve_config
from titan_rl.core.errors import ConfigError, MissingExtraError
from titan_rl.evaluation.policies.source import PolicySource, export, find_policy, newest_checkpoint
from titan_rl.training.choices import DType


async def export_policy(given: str, out: Path, dtype: DType | None, tell: Callable[[str], object]) -> str:
    """Write the newest checkpoint of a run, or the one that is named, as a Hugging Face folder, and verify it.

    Args:
        dtype: of the weights; by default that of the run.

    Returns:
        what it is, for people: "step 80 of runs/latest".

    Raises:
        ConfigError: there is no such checkpoint, or something is at `out`.
        CheckpointError: the checkpoint is damaged, or the folder cannot be written.
    """
    for module in ("torch", "torchtitan", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(module, "cpu")
    source = _saved(given)
    _check_free(out)
    assert source.toml is not None
    assert source.checkpoint is not None
    model = load_serve_config(source.toml, (), policy=None).model
    if dtype is not None:
        model = model.model_copy(update={"dtype": dtype})
    tell(f"reading {source.name}")
    logs = Path(tempfile.mkdtemp(prefix="titan_rl-export-"))  # it stays where this fails
    await export(model, source.checkpoint, out, logs / "export.log")
    if note := told_of_template(model):
        tell(note)
    shutil.rmtree(logs, ignore_errors=True)
    return source.name


def _saved(given: str) -> PolicySource:
    path = Path(given)
    source = newest_checkpoint(path) if (path / "config.toml").is_file() else find_policy(given)
    if source is None or source.checkpoint is None:
        what = "has no checkpoint yet" if source is None else "is no run and no checkpoint"
        raise ConfigError(f"{given} {what}; name a run's folder, or one below its checkpoints")
    return source


def _check_free(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} exists, and nothing is written over; name a folder that does not")
    above = next(folder for folder in out.parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{out} cannot be made: nothing can be written in {above}; name another folder")
