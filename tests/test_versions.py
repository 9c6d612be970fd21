"""Weight versions come from the trainer; every receiver rejects one that does not follow from the previous one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import pytest

from titan_rl.core.errors import CheckpointError, StateDictError, TrainingError
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress
from titan_rl.run.resumption import Resumption
from titan_rl.scheduling.batches import GroupBatch
from titan_rl.training.trainer_protocol import agreed_version
from titan_rl.weights.manifest import join
from titan_rl.weights.types import Manifest, PublishedWeights


def test_ranks_must_agree_on_the_version() -> None:
    assert agreed_version([3, 3], "after a step") == 3
    with pytest.raises(TrainingError, match=r"versions \[3, 4\] after a step"):
        agreed_version([3, 4], "after a step")
    with pytest.raises(StateDictError, match=r"versions \[3, 4\] cannot be joined"):
        join([Manifest(3, ()), Manifest(4, ())])


def test_trained_version_must_be_the_next_step() -> None:
    batch = GroupBatch([], 6, {}, lambda: None)
    batch.trained(7)
    assert batch.step == 7
    for other in (6, 8):
        with pytest.raises(TrainingError, match=f"the step from version 6 gave version {other}"):
            batch.trained(other)


class Loading:
    """Trainer whose checkpoint holds the weights of one version."""

    def __init__(self, version: int) -> None:
        self.version = version

    async def load(self, checkpoint: Path) -> int:
        return self.version


async def test_checkpoint_weights_and_state_must_be_of_the_same_step() -> None:
    start = Resumption(Path("checkpoints/step-000004"), RunState(step=4))
    progress = Progress(4, io.StringIO())
    await start.load(cast("Any", Loading(4)), progress)
    with pytest.raises(CheckpointError, match="step-000004 has weights of version 5 and the run's state of step 4"):
        await start.load(cast("Any", Loading(5)), progress)


def test_published_versions_must_increase() -> None:
    published = PublishedWeights()
    published.announce(Manifest(5, ()))
    with pytest.raises(StateDictError, match="version 4 is published after version 5"):
        published.announce(Manifest(4, ()))
    assert published.manifest_of(5).version == 5
    with pytest.raises(StateDictError, match="version 4 is not published; the newest is 5"):
        published.manifest_of(4)
