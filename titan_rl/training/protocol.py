"""Interface of training for the controller: `Trainer` and `StepResult`. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titan_rl.core.errors import TrainingError
from titan_rl.training.data.sample import TrainingSample
from titan_rl.weights.types import Manifest


@dataclass(frozen=True, slots=True)
class SkippedMinibatch:
    """Part of a step that no update was made of; the fields are those of `UntrainableError`."""

    reason: str
    rollout_ids: tuple[str, ...]
    at_fault: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Version and metrics of one step.

    `metrics` holds loss and grad_norm (means over its minibatches), lr, num_tokens (trained), num_samples,
    num_dropped_samples (longer than a row), padding_fraction, wait_for_copy_s (until the optimizer could change weights
    that were being published), and what `titan_rl.training.objective.token_metrics` documents. Another
    trainer may leave out any of them: they are logged and shown where they are there. A step of which every minibatch
    was skipped has no loss and no grad_norm.
    """

    version: int  # of the weights after the step
    metrics: dict[str, float]
    skipped: tuple[SkippedMinibatch, ...] = ()  # what the weights have not learned from


def agreed_version(versions: Sequence[int], when: str) -> int:
    """The version of all ranks.

    Raises:
        TrainingError: they have not the same.
    """
    if len(set(versions)) != 1:
        raise TrainingError(f"the trainer's ranks have versions {list(versions)} {when}; all must have the same")
    return versions[0]


class Trainer(Protocol):
    """Interface of a trainer for the controller: an actor's handle in a run, a plain object in a test.

    The trainer counts the policy versions; all others take them from it. It completes every call, whether or not the
    caller still waits.
    """

    async def step(self, samples: Sequence[TrainingSample]) -> StepResult:
        """One optimizer step; the policy version grows by one, also where nothing could be learned from the samples
        and `StepResult.skipped` says so."""
        ...

    async def measure(self, samples: Sequence[TrainingSample]) -> float:
        """The loss of samples under the current weights, which stay as they are."""
        ...

    async def begin_publish(self) -> None:
        """Fix the current version as the one that generators get. The next step may begin then: it changes no weight
        before they are copied."""
        ...

    async def finish_publish(self) -> Manifest:
        """The manifest of the version begun last, once all of it can be read. Also asked for again, where a version
        could not be pulled."""
        ...

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        """Copy what `load` needs. It is written to the folder `root/step-<version>` while training goes on. Whoever
        writes it under another name and renames that leaves none behind that is not whole.

        Args:
            run_state: `dataclasses.asdict` of a `RunState`, which the checkpoint holds as `run_state.json`. Where the
                folder has no such file, or no `checksums.json`, the run adds it after `finish_save`.

        Returns:
            the version that is saved.

        Raises:
            CheckpointError: `run_state["step"]` is another version than that of the weights; nothing is written.
        """
        ...

    async def finish_save(self) -> None:
        """Returns once the checkpoint begun last is on disk.

        Raises:
            NoSpaceError: the disk is full.
            CheckpointError: it could not be written for another reason.
        """
        ...

    async def load(self, checkpoint: Path) -> int:
        """Go on from a checkpoint. Asked for where a run is resumed.

        Returns:
            its version.
        """
        ...

    async def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        ...
