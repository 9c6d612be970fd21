"""What the controller knows of training. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from titan_rl.statedict.types import Manifest
from titan_rl.training.sample import TrainingSample


class Trainer(Protocol):
    """What the controller knows of training: an actor's handle in a run, a plain object in a test."""

    async def step(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """One optimizer step; the policy version grows by one."""
        ...

    async def begin_publish(self) -> None:
        """Fix the current version as the one that generators get. The next step may begin then: it changes no weight
        before they are copied."""
        ...

    async def finish_publish(self) -> Manifest:
        """The manifest of the version begun last, once all of it can be read."""
        ...

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> None:
        """Copy what a checkpoint `root/step-<version>` holds. It is written, whole or not at all, while training goes
        on."""
        ...

    async def finish_save(self) -> None:
        """Returns once the checkpoint begun last is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        ...

    async def export(self, path: Path) -> None: ...
