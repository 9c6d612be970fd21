"""The processes of one run: a trainer, generators and rollout workers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from monarch.actor import this_proc

from titan_rl.actors.generate_service import GenerateService
from titan_rl.actors.generator_processes import GENERATOR, GeneratorProcesses
from titan_rl.actors.processes.gpus import GPUAssignment
from titan_rl.actors.processes.process import ProcessFiles
from titan_rl.actors.processes.remote_process import RemoteProcess
from titan_rl.actors.processes.respawns import RespawnLimit
from titan_rl.actors.rollout_worker import RolloutWorkerActor, RolloutWorkerSettings
from titan_rl.actors.supervised import started
from titan_rl.actors.trainer_actor import ActorTrainer, TrainerSettings
from titan_rl.actors.trainer_processes import TRAINER, spawn_trainer
from titan_rl.actors.worker_pool import WorkerPool
from titan_rl.config.concurrency import Concurrency
from titan_rl.config.run import RunConfig
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.weights.published_weights import PublishedWeights

logger = logging.getLogger(__name__)

WORKER = "rollout-worker-"


class RunFiles(ProcessFiles, Protocol):
    """What a run's processes know of its folder."""

    @property
    def config(self) -> Path:
        """The resolved settings."""
        ...


class RunProcesses(GeneratorProcesses):
    """One trainer, its generators and rollout workers, each an actor in a process of its own. Made by
    `start_processes`.

    Args:
        trains, generates: whether there is a trainer, and generators.
    """

    def __init__(
        self,
        config: RunConfig,
        files: RunFiles,
        published: PublishedWeights,
        supervisor: Any,
        service: Any,
        tell: Callable[[str], object],
        *,
        trains: bool,
        generates: bool,
    ) -> None:
        self._config = config
        self._trains, self._generates = trains, generates
        super().__init__(
            config.model,
            config.generation,
            config.routing,
            config.statedict,
            seed=config.seed,
            max_running=Concurrency.of(config).max_running,
            files=files,
            published=published,
            supervisor=supervisor,
            tell=tell,
        )
        self.trainer: ActorTrainer
        self.workers = WorkerPool(wait_s=config.generation.start_timeout_s)
        self._config_path = files.config
        self._service = service
        self._trainer_gpus: tuple[str, ...]

    def _respawn_limits(self) -> dict[str, RespawnLimit]:
        workers = RespawnLimit("rollout.max_respawns", self._config.rollout.max_respawns)
        return {**super()._respawn_limits(), WORKER: workers}

    def _assign_gpus(self, gpus: Sequence[str]) -> None:
        assignment = GPUAssignment.of(self._config, gpus)
        self._trainer_gpus, self._gpus = assignment.trainer, assignment.generators

    def _start_others(self) -> Sequence[Coroutine[Any, Any, None]]:
        workers = [self._start_worker(f"{WORKER}{index}") for index in range(self._config.rollout.num_workers)]
        return [*([self._start_trainer()] if self._trains else []), *workers]

    def _generator_names(self) -> Sequence[str]:
        return super()._generator_names() if self._generates else ()

    def _forget(self, remote: RemoteProcess, router: GeneratorRouter) -> None:
        self.workers.remove(remote)
        super()._forget(remote, router)

    async def _restart(self, name: str, router: GeneratorRouter) -> bool:
        if name.startswith(GENERATOR):
            return await super()._restart(name, router)
        await self._start_worker(name)
        return True

    async def _start_trainer(self) -> None:
        config = self._config
        settings = TrainerSettings(
            config.model,
            config.training,
            config.correction,
            config.statedict,
            self._files.run_id,
            self.log_path(TRAINER),
            config.seed,
            self._trainer_gpus,
        )
        self.trainer = await spawn_trainer(self, settings)

    async def _start_worker(self, name: str) -> None:
        settings = RolloutWorkerSettings(str(self._config_path), self.log_path(name))
        self.workers.add(*await self.spawn(name, RolloutWorkerActor, settings, self._service))


@contextlib.asynccontextmanager
async def start_processes(
    config: RunConfig,
    files: RunFiles,
    published: PublishedWeights,
    tell: Callable[[str], object] = logger.info,
    *,
    trains: bool = True,
    generates: bool = True,
) -> AsyncGenerator[RunProcesses]:
    """The processes of a run, which end with the block.

    Args:
        trains, generates: whether there is a trainer, and generators.
        tell: shows a person which processes die and are there again.

    Raises:
        ActorDiedError: a process did not start in time.
    """

    def make(supervisor: Any) -> RunProcesses:
        service = this_proc().spawn("generate_service", GenerateService)
        return RunProcesses(config, files, published, supervisor, service, tell, trains=trains, generates=generates)

    async with started(files.logs, make) as processes:
        yield processes
