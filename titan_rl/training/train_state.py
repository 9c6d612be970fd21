"""The full training state on disk, through torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from titan_rl.errors import CheckpointError
from titan_rl.training.checkpoint import atomic_directory, temporary_of
from titan_rl.training.world import World


def save_train_state(
    directory: Path, model: nn.Module, optimizers: Sequence[Optimizer], version: int, world: World
) -> None:
    """Write model, optimizers, version and torch's random state, every rank its part. The folder appears whole or not
    at all.

    Raises:
        CheckpointError: it could not be written; what was at `directory` is unchanged.
    """
    if world.is_first:
        with atomic_directory(directory) as temporary:
            world.barrier()
            _save(temporary, model, optimizers, version, world)
    else:
        world.barrier()
        _save(temporary_of(directory), model, optimizers, version, world)
    world.barrier()


def load_train_state(directory: Path, model: nn.Module, optimizers: Sequence[Optimizer], world: World) -> int:
    """Read what `save_train_state` wrote, in place. It may have been written by another number of ranks.

    Returns:
        the version.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another model.
    """
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint at {directory}")
    state = _state(model, optimizers, version=0)
    try:
        with _plain_errors():
            dcp.load(state, checkpoint_id=directory, no_dist=world.size == 1)
        set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    except Exception as error:
        raise CheckpointError(f"{directory} could not be read: {error}") from error
    torch.set_rng_state(state["rng"])
    return int(state["version"])


def _save(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], version: int, world: World) -> None:
    with _plain_errors():
        dcp.save(_state(model, optimizers, version), checkpoint_id=folder, no_dist=world.size == 1)


def _state(model: nn.Module, optimizers: Sequence[Optimizer], version: int) -> dict[str, Any]:
    fresh = [optimizer for optimizer in optimizers if not optimizer.state]
    model_state, optimizer_state = get_state_dict(model, optimizers)
    for optimizer in fresh:
        # Their state was just made by a step without gradients, which they must not count.
        for state in optimizer.state.values():
            if isinstance(step := state.get("step"), torch.Tensor):
                step.zero_()
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "version": torch.tensor(version),
        "rng": torch.get_rng_state(),
    }


@contextmanager
def _plain_errors() -> Iterator[None]:
    """DCP's exception is a BaseException that carries one traceback a rank; its warning says that one rank is one."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise RuntimeError("; ".join(str(failure[0]) for failure in error.failures.values())) from error
