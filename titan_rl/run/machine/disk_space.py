"""How much a run writes, how much room there is, and what to say where the one is more than the other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from titan_rl.config.model_folder import BYTES, count_parameters
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import ConfigError, NoSpaceError

LEFT_FREE = 1 << 24
"""Bytes that a checkpoint leaves for journal, metrics and logs, which go on when it is not written for lack of room."""

_RESERVE = f"{LEFT_FREE / 1e6:.1f} MB for journal, metrics and logs"

_AVERAGES = {"adamw": 2, "adam": 2, "muon": 2, "sgd": 1}  # of each parameter


def checkpoint_bytes(config: RunConfig) -> int:
    """Of one checkpoint, nearly: the weights, and the optimizer's averages."""
    training = config.training
    averages = _AVERAGES.get(training.optimizer, 2) * {**BYTES, "int8": 1}[training.optimizer_dtype]
    return count_parameters(Path(config.model.path)) * (BYTES[training.master_dtype] + averages)


def check_room(config: RunConfig, folder: Path, held: int = 0) -> None:
    """That the disk can hold what the run keeps.

    Args:
        folder: the run's, or that in which it will be made.
        held: bytes of its checkpoints so far.

    Raises:
        ConfigError: it cannot.
    """
    each = checkpoint_bytes(config)
    export = count_parameters(Path(config.model.path)) * BYTES[config.model.dtype]
    needed = each * (config.checkpoint.keep + 1) + export + LEFT_FREE
    free = free_bytes(folder)
    if needed > free + held:
        more = f" more than the {gigabytes(held)} of its checkpoints" if held else ""
        raise ConfigError(
            f"run_dir = {config.run_dir!r}: {folder} has {gigabytes(free)} free, and this run needs "
            f"{gigabytes(needed - held)}{more}: checkpoint.keep = {config.checkpoint.keep} checkpoints of "
            f"{gigabytes(each)} each, the one that is being written, {gigabytes(export)} of the exported policy, and "
            f"{_RESERVE}; free some, lower checkpoint.keep, or set run_dir to a folder on another disk"
        )


def require_room(folder: Path, num_bytes: int) -> None:
    """For a checkpoint of so many bytes.

    Raises:
        NoSpaceError: it does not fit.
    """
    free = free_bytes(folder)
    if num_bytes + LEFT_FREE > free:
        raise NoSpaceError(no_space(folder, num_bytes, free))


def no_space(folder: Path, num_bytes: int, free: int) -> str:
    """What to say of a checkpoint of so many bytes that did not fit."""
    now = " again, now that what was written is removed" if free >= num_bytes + LEFT_FREE else ""
    return (
        f"no space left in {folder}: a checkpoint takes {gigabytes(num_bytes)} and leaves {_RESERVE}, "
        f"{gigabytes(num_bytes + LEFT_FREE)} together; {gigabytes(free)} are free{now}"
    )


def free_bytes(folder: Path) -> int:
    """That this user may still write there, or in the first of its parents that exists."""
    while not os.path.exists(folder):  # of a name that is too long, too, which creating it complains of
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free


def size_of(folder: Path) -> int:
    """Bytes of all files below it; of one that vanishes meanwhile, none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def gigabytes(num_bytes: float) -> str:
    """`gigabytes(12_300_000_000)` is "12.3 GB", and `gigabytes(12_300_000)` is "12.3 MB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
