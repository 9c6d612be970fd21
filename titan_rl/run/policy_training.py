"""Training of one policy, by a run or by one experiment of a run: its state and outputs, from which its trainer and its
controller are opened."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_rl.cluster.hosts.lifecycle import HostHistory
from titan_rl.config.build import find_token_texts, learning_rate_note
from titan_rl.config.model_folder import adapter_base_note
from titan_rl.config.run import RunConfig
from titan_rl.core.console import Console
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.rollout.group.rollouter import GroupRunner
from titan_rl.rollout.renderer import Renderer
from titan_rl.run.controller import Controller
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.observability.processor_meter import ProcessorSource
from titan_rl.run.observability.progress import Progress
from titan_rl.run.resumption import Resumption
from titan_rl.run.trainer_recovery import JournaledSteps, RecoveringTrainer, TrainerGroup, open_trainer
from titan_rl.scheduling.filters import GroupFilter
from titan_rl.training.teacher import Teacher
from titan_rl.training.trainer_protocol import Trainer
from titan_rl.weights.types import PublishedWeights

if TYPE_CHECKING:
    from titan_rl.cluster.rollout_worker_pool import WorkerPool


def show_notes(config: RunConfig, console: Console) -> None:
    """Show notes on settings that are allowed, but unusual."""
    notes = learning_rate_note(config.training), adapter_base_note(config.model, config.training.adapter)
    for note in filter(None, notes):
        console.message(note)


@dataclass(frozen=True, slots=True)
class PolicyTraining:
    """Training of one policy.

    Args:
        start: State that the training begins or resumes from.
        journal: Journal in the folder, which is open.
        published: Manifests of published versions, for the router's replicas.
    """

    config: RunConfig
    run_dir: RunDirectory
    progress: Progress
    sinks: MetricSink
    start: Resumption
    journal: RunJournal
    published: PublishedWeights

    def open_trainer(self, group: TrainerGroup) -> contextlib.AbstractAsyncContextManager[RecoveringTrainer]:
        """Open the trainer of a group; see `trainer_recovery.open_trainer`."""
        steps = JournaledSteps(self.config, self.journal, self.run_dir.path)
        return open_trainer(group, steps, self.config, self.run_dir, self.published, self.progress)

    async def load_controller(
        self,
        trainer: Trainer,
        router: GeneratorRouter,
        group_runners: Mapping[str, GroupRunner],
        renderer: Renderer,
        *,
        filters: Sequence[GroupFilter] | None = None,
        hosts: HostHistory | None = None,
        processes: ProcessorSource | None = None,
        teachers: Mapping[str, Teacher] | None = None,
        workers: WorkerPool | None = None,
    ) -> Controller:
        """Have the trainer load the checkpoint, if there is one, and build the controller; see `Controller` for the
        arguments.

        Raises:
            CheckpointError: The run state in the checkpoint is that of another version.
        """
        await self.start.load(trainer, self.progress)
        return Controller(
            self.config,
            group_runners=group_runners,
            router=router,
            trainer=trainer,
            stop_token_ids=renderer.get_stop_token_ids(),
            published=self.published,
            run_dir=self.run_dir,
            sinks=self.sinks,
            progress=self.progress,
            journal=self.journal,
            start=self.start.state,
            token_texts=find_token_texts(self.config.model),
            filters=filters,
            hosts=hosts,
            processes=processes,
            teachers=teachers,
            workers=workers,
        )
