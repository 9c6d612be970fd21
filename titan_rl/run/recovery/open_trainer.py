"""The trainer of a run of reinforcement learning."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from titan_rl.config.run import RunConfig
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.observability.progress import Progress
from titan_rl.run.recovery.recovering_trainer import RecoveringTrainer, recovering
from titan_rl.run.recovery.trained_steps import JournaledSteps
from titan_rl.run.recovery.trainer_group import TrainerGroup
from titan_rl.training.protocol import Trainer
from titan_rl.weights.published_weights import PublishedWeights


@contextlib.asynccontextmanager
async def open_trainer(
    given: Trainer | None,
    group: TrainerGroup | None,
    config: RunConfig,
    journal: RunJournal,
    run_dir: RunDirectory,
    published: PublishedWeights,
    progress: Progress,
) -> AsyncGenerator[Trainer]:
    """The one that was given; or that of a group, which is started again when it dies."""
    if group is None:
        assert given is not None
        yield given
        return
    trainer = RecoveringTrainer(
        group,
        steps=JournaledSteps(config, journal, run_dir.path),
        checkpoints=run_dir.checkpoints,
        published=published,
        max_respawns=config.training.max_respawns,
        progress=progress,
    )
    async with recovering(trainer):
        yield trainer
