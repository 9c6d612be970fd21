"""Export of policies as Hugging Face folders, by a separate process."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path

from titan_rl.config.build import template_note
from titan_rl.config.hosts import HostsConfig
from titan_rl.config.serve import load_serve_config
from titan_rl.core.console import Console
from titan_rl.core.errors import CheckpointError, ConfigError
from titan_rl.evaluation.policies.policy_source import PolicySource, find_policy, newest_checkpoint, single_policy
from titan_rl.run.checks.requirements import require_modules
from titan_rl.training.choices import DType
from titan_rl.training.settings import ModelConfig


async def export_weights(
    model: ModelConfig, checkpoint: Path, directory: Path, log: Path, *, as_adapter: bool = False
) -> ModelConfig:
    """Export a model with the weights of a checkpoint, or with an adapter in PEFT's format merged into its weights.

    A separate process does this. It needs no GPU, and is killed when this is cancelled.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the folder cannot be written. The message has the reason.
    """
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "titan_rl.training.export"),
            *(model.path, str(checkpoint), str(directory), model.dtype, model.renderer),
            "adapter" if as_adapter else "model",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C is for the server, which kills this process
        )
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        raise CheckpointError(f"{checkpoint} cannot be read: {_last_line(log) or f'exit code {code}'}; see {log}")
    return model.model_copy(update={"path": str(directory)})


def with_file_sync(hosts: HostsConfig) -> HostsConfig:
    """Copy settings of hosts so that files are copied to hosts that lack them. This is needed for an exported policy,
    which is in a temporary folder of this machine."""
    return hosts.model_copy(update={"sync": True})


def _last_line(log: Path) -> str:
    return log.read_text(errors="replace").strip().rpartition("\n")[2]


async def export_policy(
    given: str, out: Path, dtype: DType | None, console: Console, *, as_adapter: bool = False, best: bool = False
) -> str:
    """Export the newest checkpoint of a run, or a given checkpoint, as a Hugging Face folder, and verify the folder.

    Args:
        dtype: Dtype of the weights; by default, that of the run.
        as_adapter: Whether to write only the adapter, in PEFT's format.
        best: Whether to export a run's checkpoint with the highest held-out reward instead of the newest one.

    Returns:
        The policy's name for messages, such as "step 80 of runs/latest".

    Raises:
        ConfigError: The checkpoint does not exist, or `out` already exists.
        CheckpointError: The checkpoint is damaged, or the folder cannot be written.
    """
    require_modules("torch", "torchtitan", "transformers")
    source = _saved(given, best=best)
    _check_free(out)
    assert source.toml is not None
    assert source.checkpoint is not None
    model = load_serve_config(source.toml, (), policy=None).model
    if dtype is not None:
        model = model.model_copy(update={"dtype": dtype})
    console.message(f"reading {source.name}")
    logs = Path(tempfile.mkdtemp(prefix="titan_rl-export-"))  # it remains if this fails
    await export_weights(model, source.checkpoint, out, logs / "export.log", as_adapter=as_adapter)
    if not as_adapter and (note := template_note(model)):
        console.message(note)
    shutil.rmtree(logs, ignore_errors=True)
    return source.name


def _saved(given: str, *, best: bool) -> PolicySource:
    path = Path(given)
    if is_run := (path / "config.toml").is_file():
        path = single_policy(path)
    source = newest_checkpoint(path, best=best) if is_run else find_policy(given)
    if best and not is_run:
        raise ConfigError(f"{given} is not a run, of which --best chooses a checkpoint; leave --best out")
    if source is None or source.checkpoint is None or source.toml is None:
        what = "has no checkpoint yet" if source is None else "is neither a run nor a checkpoint"
        raise ConfigError(f"{given} {what}; name a run's folder, or one below its checkpoints")
    return source


def _check_free(out: Path) -> None:
    if os.path.lexists(out):
        raise ConfigError(f"{out} already exists and is not overwritten; name a new folder")
    above = next(folder for folder in out.parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{out} cannot be created: {above} is not writable; name another folder")
