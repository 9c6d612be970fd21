"""The full training state on disk, through torch.distributed.checkpoint, written while training goes on."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from titan_rl.errors import CheckpointError
from titan_rl.training.checkpoint import atomic_directory, temporary_of
from titan_rl.training.world import World

LIMIT_S = 1800.0
"""Longest wait for one checkpoint to be written."""


class TrainStateWriter:
    """Writes model, optimizers, version and torch's random state, every rank its part. One at a time.

    All ranks call `begin` and then `finish` at the same time. The disk is written in a thread of its own, where the
    ranks meet in a group of their own.
    """

    def __init__(self, world: World) -> None:
        self._world = world.apart()
        on_gpu = torch.cuda.is_available()
        # The copies' memory serves the next checkpoint again.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
            )
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def begin(
        self,
        directory: Path,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        version: int,
        files: Mapping[str, str],
    ) -> None:
        """Copy the state, so that the next step may change it, and begin to write. Waits for the one before, whose
        `finish` tells how it ended.

        Args:
            files: what else the folder is to hold: name -> text.

        Raises:
            CheckpointError: the one before is not written yet, after a long wait.
        """
        self._wait()
        state = self._stager.stage(_state(model, optimizers, version))
        assert not isinstance(state, Future), "staging is synchronous"
        # Monarch keeps the actor that calls in the context.
        write = contextvars.copy_context().run
        self._writing = self._thread.submit(write, self._write, directory, state, files)

    def finish(self) -> None:
        """Returns once the folder is whole.

        Raises:
            CheckpointError: it could not be written, or not in time; what was there is unchanged.
        """
        self._wait()
        if self._writing is not None:
            self._writing.result()

    def _wait(self) -> None:
        if self._writing is not None and not wait([self._writing], timeout=LIMIT_S).done:
            raise CheckpointError(f"the checkpoint begun last was not written within {LIMIT_S:g} s: the disk is slow")

    def _write(self, directory: Path, state: dict[str, Any], files: Mapping[str, str]) -> None:
        problem: Exception | None = None
        try:
            self._write_part(directory, state, files)
        except Exception as error:
            problem = error
        try:
            self._world.agree(None if problem is None else str(problem), CheckpointError)
        except CheckpointError as error:
            raise error from problem

    def _write_part(self, directory: Path, state: dict[str, Any], files: Mapping[str, str]) -> None:
        with ExitStack() as stack:
            problem = None
            try:
                if self._world.is_first:
                    stack.enter_context(atomic_directory(directory))
            except CheckpointError as error:
                problem = str(error)
            self._world.agree(problem, CheckpointError)
            folder = temporary_of(directory)
            with _plain_errors():
                dcp.save(state, checkpoint_id=folder, no_dist=self._world.size == 1, process_group=self._world.group)
            if self._world.is_first:
                for name, text in files.items():
                    (folder / name).write_text(text)


def load_train_state(directory: Path, model: nn.Module, optimizers: Sequence[Optimizer], world: World) -> int:
    """Read what a `TrainStateWriter` wrote, in place. It may have been written by another number of ranks.

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
