"""The trainer's processes: as those of a whole run, or alone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from titan_rl.actors.processes.gpus import take_gpus, visible_gpus
from titan_rl.actors.processes.process import ProcessFiles
from titan_rl.actors.supervised import SupervisedProcesses, started
from titan_rl.actors.trainer_actor import ActorTrainer, TrainerActor, TrainerSettings
from titan_rl.config.run import RunConfig

TRAINER = "trainer"


async def spawn_trainer(processes: SupervisedProcesses, settings: TrainerSettings) -> ActorTrainer:
    """A process for each of its ranks, which have loaded the model.

    Raises:
        ActorDiedError: they did not start in time.
        ModelError: the model folder cannot be used.
    """
    training = settings.training
    num_ranks = training.data_parallel * training.tensor_parallel
    remote, ranks = await processes.spawn(TRAINER, TrainerActor, settings, num_ranks=num_ranks)
    return ActorTrainer(remote, ranks, training)


class _TrainerAlone(SupervisedProcesses):
    trainer: ActorTrainer

    def __init__(self, config: RunConfig, files: ProcessFiles, supervisor: object) -> None:
        super().__init__(files, supervisor, config.generation.start_timeout_s)
        self._config = config

    async def start(self) -> None:
        config = self._config
        settings = TrainerSettings(
            config.model,
            config.training,
            config.correction,
            None,
            self._files.run_id,
            self.log_path(TRAINER),
            config.seed,
            take_gpus(config.training, visible_gpus()),
        )
        self.trainer = await spawn_trainer(self, settings)


@contextlib.asynccontextmanager
async def start_trainer(config: RunConfig, files: ProcessFiles) -> AsyncGenerator[ActorTrainer]:
    """A trainer that publishes to nobody. Its processes end with the block.

    Raises:
        ConfigError: there are GPUs, and too few of them.
        ActorDiedError: a process did not start within `generation.start_timeout_s`.
    """
    async with started(files.logs, lambda supervisor: _TrainerAlone(config, files, supervisor)) as alone:
        yield alone.trainer
