"""Interface of training for the controller: `Trainer` and `StepResult`. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from titan_rl.core.errors import TrainingError
from titan_rl.training.data.sample import TrainingSample
from titan_rl.weights.types import Manifest


@dataclass(frozen=True, slots=True)
class SkippedMinibatch:
    """Minibatch of a step without an update; the fields are those of `UntrainableError`."""

    reason: str
    rollout_ids: tuple[str, ...]
    at_fault: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Version and metrics of one step.

    `metrics` holds loss and grad_norm (means over the step's minibatches), lr, num_tokens (trained), num_samples,
    num_dropped_samples (longer than a row), padding_fraction, wait_for_copy_s (seconds until the optimizer could change
    weights that were being published), the metrics of `titan_rl.training.objective.token_metrics` and, with a critic,
    value_loss and explained_variance. A custom trainer may leave out any of them. A step whose minibatches were all
    skipped has no loss and no grad_norm.
    """

    version: int  # version of the weights after the step
    metrics: dict[str, float]
    skipped: tuple[SkippedMinibatch, ...] = ()


def agreed_version(versions: Sequence[int], when: str) -> int:
    """Check that all ranks have the same version, and return that version.

    Args:
        versions: Version of each rank.
        when: Time at which the versions were read, for the error message, such as "after a step".

    Raises:
        TrainingError: The versions differ.
    """
    if len(set(versions)) != 1:
        raise TrainingError(f"the trainer's ranks have versions {list(versions)} {when}; all must have the same")
    return versions[0]


class Trainer(Protocol):
    """Interface of a trainer as the controller uses it: an actor's handle in a run, a plain object in a test.

    The trainer assigns the policy versions. It completes every call, even if the caller no longer waits.
    """

    async def step(self, samples: Sequence[TrainingSample]) -> StepResult:
        """Run one optimizer step. The policy version increases by one, even if the step had to be skipped (see
        `StepResult.skipped`)."""
        ...

    async def measure(self, samples: Sequence[TrainingSample]) -> float:
        """Compute the loss of samples under the current weights, which do not change."""
        ...

    async def begin_publish(self) -> None:
        """Begin to publish the current version. The next step may begin once this returns: it changes no weight before
        that weight is copied."""
        ...

    async def finish_publish(self) -> Manifest:
        """Wait until the version begun last can be read, and return its manifest. The controller calls this again if a
        version could not be pulled."""
        ...

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        """Copy the state for `load`, and write it to the folder `root/step-<version>` while training continues. Writing
        under a temporary name and renaming it ensures that the folder is never incomplete.

        Args:
            run_state: `dataclasses.asdict` of a `RunState`, to be stored as `run_state.json`. If the folder lacks this
                file or `checksums.json`, the run adds it after `finish_save`.

        Returns:
            The saved version.

        Raises:
            CheckpointError: `run_state["step"]` is not the version of the weights; nothing is written.
        """
        ...

    async def finish_save(self) -> None:
        """Wait until the checkpoint begun last is on disk.

        Raises:
            NoSpaceError: The disk is full.
            CheckpointError: The checkpoint could not be written for another reason.
        """
        ...

    async def load(self, checkpoint: Path) -> int:
        """Continue from a checkpoint, when a run is resumed.

        Returns:
            The checkpoint's version.
        """
        ...

    async def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        ...


@runtime_checkable
class HoldingTrainer(Protocol):
    """A trainer that can keep one published version for generators that start later."""

    async def hold_published(self, version: int | None) -> bool:
        """Keep a published version in addition to the newest ones, in place of the version held before. With None, hold
        no version.

        Returns:
            Whether the version is available and is now kept.
        """
        ...
