"""The processes of one run: started together, watched while it lasts, and ended on every way out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

from monarch.actor import this_proc

from titan_rl.actors.actor_replica import ActorReplica
from titan_rl.actors.generate_service import GenerateService
from titan_rl.actors.generator import GeneratorActor, GeneratorSettings
from titan_rl.actors.processes.gpus import GPUAssignment, visible_gpus
from titan_rl.actors.processes.process import ProcessActor, stderr_into
from titan_rl.actors.processes.remote_process import RemoteProcess, call
from titan_rl.actors.processes.respawns import RespawnLimit, Respawns
from titan_rl.actors.processes.supervisor import ProcessFailure, Supervisor
from titan_rl.actors.rollout_worker import RolloutWorkerActor, RolloutWorkerSettings
from titan_rl.actors.trainer import ActorTrainer, TrainerActor, TrainerSettings
from titan_rl.actors.worker_pool import WorkerPool
from titan_rl.calls.user_code import reason
from titan_rl.config.concurrency import Concurrency
from titan_rl.config.run import RunConfig
from titan_rl.errors import ActorDiedError, EngineDeadError, EngineStalledError, GenerationError, TitanRLError
from titan_rl.generation.registry import EngineSpec
from titan_rl.generation.router.replica import Replica
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.weights.board import VersionBoard

logger = logging.getLogger(__name__)

TRAINER = "trainer"
GENERATOR = "generator-"
WORKER = "rollout-worker-"
STOP_TIMEOUT_S = 30.0


class RunFiles(Protocol):
    """What a run's processes know of its folder."""

    @property
    def run_id(self) -> str:
        """In the names of what they share."""
        ...

    @property
    def config(self) -> Path:
        """The resolved settings."""
        ...

    @property
    def logs(self) -> Path:
        """The folder of a log for each process."""
        ...


class RunProcesses:
    """One trainer, its generators and rollout workers, each an actor in a process of its own. Made by
    `start_processes`."""

    def __init__(
        self,
        config: RunConfig,
        files: RunFiles,
        board: VersionBoard,
        supervisor: Any,
        service: Any,
        tell: Callable[[str], object],
    ) -> None:
        self.trainer: ActorTrainer
        self.replicas: list[ActorReplica]
        self._assignment: GPUAssignment
        self.workers = WorkerPool(wait_s=config.generation.start_timeout_s)
        self._config = config
        self._files = files
        self._board = board
        self._supervisor = supervisor
        self._service = service
        self._tell = tell
        self._respawns = Respawns(
            {
                GENERATOR: RespawnLimit("generation.max_respawns", config.generation.max_respawns),
                WORKER: RespawnLimit("rollout.max_respawns", config.rollout.max_respawns),
            }
        )
        self._remotes: dict[str, RemoteProcess] = {}  # by id, of those not known to have ended
        self._ended: asyncio.Queue[RemoteProcess] = asyncio.Queue()
        self._opened: list[ActorReplica] = []

    async def start(self) -> None:
        """Start all processes at once.

        Raises:
            ConfigError: there are GPUs, and too few of them.
            ActorDiedError: one did not start within `generation.start_timeout_s`.
        """
        self._assignment = GPUAssignment.of(self._config, visible_gpus())
        names = [f"{GENERATOR}{index}" for index in range(self._config.generation.num_generators)]
        async with asyncio.TaskGroup() as starting:
            trainer = starting.create_task(self._start_trainer())
            generators = [starting.create_task(self._start_generator(name)) for name in names]
            for index in range(self._config.rollout.num_workers):
                starting.create_task(self._start_worker(f"{WORKER}{index}"))
        self.trainer = trainer.result()
        self.replicas = [task.result() for task in generators]

    def on_replica_failed(self, replica: Replica, error: Exception) -> None:
        """For the router: an engine that has ended or hangs does not come back, though its process lives."""
        if not isinstance(replica, ActorReplica) or replica.remote.reason is not None:
            return
        if isinstance(error, EngineDeadError | EngineStalledError):
            replica.remote.end(reason(error))
        else:
            self._tell(f"{replica.name} is out of service until it has the current weights: {reason(error)}")

    async def watch(self, router: GeneratorRouter) -> None:
        """Replace generators and rollout workers that die, until cancelled. The router has the requests of a dead
        generator go on elsewhere meanwhile.

        Raises:
            ActorDiedError: the trainer died, or one more generator than `generation.max_respawns` or rollout worker
                than `rollout.max_respawns`.
        """
        async with asyncio.TaskGroup() as background:

            async def listen() -> None:
                while True:
                    failure: ProcessFailure = await call(self._supervisor.next_failure, who="supervisor")
                    if (remote := self._remotes.get(failure.process_id)) is not None:
                        remote.end(failure.reason)

            async def respawn(gone: RemoteProcess) -> None:
                began = asyncio.get_running_loop().time()
                with contextlib.suppress(ActorDiedError):
                    await call(self._supervisor.terminate, (gone.id,), who="supervisor", timeout_s=STOP_TIMEOUT_S)
                with contextlib.suppress(ActorDiedError, GenerationError):  # it ended in turn, and its end is queued
                    if gone.name.startswith(WORKER):
                        await self._start_worker(gone.name)
                    else:
                        replica = await self._start_generator(gone.name)
                        if replica.remote.reason is not None or not await router.add_replica(replica):
                            return
                    self._tell(f"{gone.name} is there again after {asyncio.get_running_loop().time() - began:.0f} s")

            background.create_task(listen())
            while True:
                remote = await self._ended.get()
                replaced, count = self._respawns.take(remote.name)
                if not replaced:
                    log = self._files.logs / f"{remote.name}.log"
                    raise ActorDiedError(f"{remote.name} died: {remote.reason}{count}; its log is {log}")
                logger.warning("%s died: %s; starting another%s", remote.name, remote.reason, count)
                self._tell(f"{remote.name} died: {remote.reason}; starting another{count}")
                self.workers.remove(remote)
                if remote.name in {replica.name for replica in router.replicas}:  # else it died while it started
                    router.remove_replica(remote.name)
                background.create_task(respawn(remote))

    async def _start_trainer(self) -> ActorTrainer:
        config = self._config
        settings = TrainerSettings(
            config.model,
            config.training,
            config.correction,
            config.statedict,
            self._run_id,
            self._log_path(TRAINER),
            config.seed,
            self._assignment.trainer,
        )
        num_ranks = config.training.data_parallel * config.training.tensor_parallel
        remote, ranks = await self._spawn(TRAINER, TrainerActor, settings, num_ranks=num_ranks)
        return ActorTrainer(remote, ranks, config.training)

    async def _start_generator(self, name: str) -> ActorReplica:
        config = self._config
        generation, index = config.generation, int(name.removeprefix(GENERATOR))
        engine = EngineSpec(
            config.model.path,
            dtype=config.model.dtype,
            max_context=config.model.max_context,
            max_running=Concurrency.of(config).max_running,
            kv_cache_gib=generation.kv_cache_gib,
            seed=config.seed,
            routed_experts=generation.return_routed_experts,
            tensor_parallel_size=generation.tensor_parallel_size,
            generator=index,
        )
        settings = GeneratorSettings(
            engine,
            generation,
            config.statedict,
            self._run_id,
            self._log_path(name),
            self._assignment.generators[index],
        )
        num_ranks = generation.tensor_parallel_size
        remote, ranks = await self._spawn(name, GeneratorActor, settings, num_ranks=num_ranks)
        replica = ActorReplica(remote, ranks.slice(procs=0), self._board)
        self._opened.append(replica)
        await replica.connect()
        return replica

    async def _start_worker(self, name: str) -> None:
        settings = RolloutWorkerSettings(str(self._files.config), self._log_path(name))
        self.workers.add(*await self._spawn(name, RolloutWorkerActor, settings, self._service))

    async def _spawn(
        self, name: str, actor_class: type[ProcessActor], *arguments: Any, num_ranks: int = 1
    ) -> tuple[RemoteProcess, Any]:
        """A process, or a group of them, and the handle of its actor, which has started."""
        remote = RemoteProcess(name, self._note_end)
        self._remotes[remote.id] = remote
        limit_s = self._config.generation.start_timeout_s
        try:
            spawn = self._supervisor.spawn
            actor = await call(spawn, remote.id, actor_class, arguments, num_ranks, who="supervisor", timeout_s=limit_s)
            remote.watch(await remote.call_all(actor.pid, timeout_s=limit_s))
            await remote.call_all(actor.start, timeout_s=limit_s)
        except TitanRLError as error:
            remote.end(f"it did not start: {reason(error)}")
            raise
        return remote, actor

    def _note_end(self, remote: RemoteProcess) -> None:
        del self._remotes[remote.id]
        self._ended.put_nowait(remote)

    async def close(self) -> None:
        """End every process."""
        for remote in self._remotes.values():
            remote.close()
        for replica in self._opened:
            replica.disconnect()
        with contextlib.suppress(ActorDiedError):
            await call(self._supervisor.terminate, who="supervisor", timeout_s=STOP_TIMEOUT_S)

    @property
    def _run_id(self) -> str:
        return self._files.run_id

    def _log_path(self, name: str) -> str:
        return str(self._files.logs / f"{name}.log")


@contextlib.asynccontextmanager
async def start_processes(
    config: RunConfig, files: RunFiles, board: VersionBoard, tell: Callable[[str], object] = logger.info
) -> AsyncIterator[RunProcesses]:
    """A started processes, whose processes end with the block.

    Args:
        tell: shows a person which processes die and are there again.

    Raises:
        ActorDiedError: a process did not start in time.
    """
    with stderr_into(files.logs / "monarch.log"):  # it greets its user there when it is first used
        supervisor = this_proc().spawn("supervisor", Supervisor)
        service = this_proc().spawn("generate_service", GenerateService)
    processes = RunProcesses(config, files, board, supervisor, service, tell)
    try:
        await processes.start()
        yield processes
    finally:
        await processes.close()
