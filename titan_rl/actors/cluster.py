"""The processes of one run: started together, watched while it lasts, and ended on every way out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from monarch.actor import this_proc

from titan_rl.actors.generate_service import GenerateService
from titan_rl.actors.generator import GeneratorActor, GeneratorSettings
from titan_rl.actors.peer import Peer, call
from titan_rl.actors.placement import Placement, visible_gpus
from titan_rl.actors.process import ProcessActor, stderr_into
from titan_rl.actors.replica import ActorReplica
from titan_rl.actors.respawns import RespawnLimit, Respawns
from titan_rl.actors.rollout_worker import RolloutWorkerActor, RolloutWorkerSettings
from titan_rl.actors.supervisor import ProcessFailure, Supervisor
from titan_rl.actors.trainer import ActorTrainer, TrainerActor, TrainerSettings
from titan_rl.actors.worker_pool import WorkerPool
from titan_rl.config.concurrency import Concurrency
from titan_rl.config.run import RunConfig
from titan_rl.errors import ActorDiedError, EngineDeadError, EngineStalledError, GenerationError, TitanRLError
from titan_rl.observability.run_dir import RunDirectory
from titan_rl.routing.replica import Replica
from titan_rl.routing.router import GeneratorRouter
from titan_rl.statedict.board import VersionBoard
from titan_rl.user_code import reason

logger = logging.getLogger(__name__)

TRAINER = "trainer"
GENERATOR = "generator-"
WORKER = "rollout-worker-"
STOP_TIMEOUT_S = 30.0


class Cluster:
    """One trainer, its generators and rollout workers, each an actor in a process of its own. Made by
    `start_cluster`."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDirectory,
        board: VersionBoard,
        supervisor: Any,
        service: Any,
        tell: Callable[[str], object],
    ) -> None:
        self.trainer: ActorTrainer
        self.replicas: list[ActorReplica]
        self._placement: Placement
        self.workers = WorkerPool(wait_s=config.generation.start_timeout_s)
        self._config = config
        self._run_dir = run_dir
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
        self._peers: dict[str, Peer] = {}  # by id, of every process that was started and is not known to have ended
        self._ended: asyncio.Queue[Peer] = asyncio.Queue()
        self._opened: list[ActorReplica] = []

    async def start(self) -> None:
        """Start all processes at once.

        Raises:
            ConfigError: there are GPUs, and too few of them.
            ActorDiedError: one did not start within `generation.start_timeout_s`.
        """
        self._placement = Placement.of(self._config, visible_gpus())
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
        if not isinstance(replica, ActorReplica) or replica.peer.reason is not None:
            return
        if isinstance(error, EngineDeadError | EngineStalledError):
            replica.peer.end(reason(error))
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
                    if (peer := self._peers.get(failure.peer_id)) is not None:
                        peer.end(failure.reason)

            async def respawn(gone: Peer) -> None:
                began = asyncio.get_running_loop().time()
                with contextlib.suppress(ActorDiedError):
                    await call(self._supervisor.terminate, (gone.id,), who="supervisor", timeout_s=STOP_TIMEOUT_S)
                with contextlib.suppress(ActorDiedError, GenerationError):  # it ended in turn, and its end is queued
                    if gone.name.startswith(WORKER):
                        await self._start_worker(gone.name)
                    else:
                        replica = await self._start_generator(gone.name)
                        if replica.peer.reason is not None or not await router.add_replica(replica):
                            return
                    self._tell(f"{gone.name} is there again after {asyncio.get_running_loop().time() - began:.0f} s")

            background.create_task(listen())
            while True:
                peer = await self._ended.get()
                replaced, count = self._respawns.take(peer.name)
                if not replaced:
                    log = self._run_dir.logs / f"{peer.name}.log"
                    raise ActorDiedError(f"{peer.name} died: {peer.reason}{count}; its log is {log}")
                logger.warning("%s died: %s; starting another%s", peer.name, peer.reason, count)
                self._tell(f"{peer.name} died: {peer.reason}; starting another{count}")
                self.workers.remove(peer)
                if peer.name in {member.name for member in router.members}:  # else it died while it started
                    router.remove_replica(peer.name)
                background.create_task(respawn(peer))

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
            self._placement.trainer,
        )
        num_ranks = config.training.data_parallel * config.training.tensor_parallel
        peer, ranks = await self._spawn(TRAINER, TrainerActor, settings, num_ranks=num_ranks)
        return ActorTrainer(peer, ranks, config.training)

    async def _start_generator(self, name: str) -> ActorReplica:
        config = self._config
        settings = GeneratorSettings(
            config.model,
            config.generation,
            config.statedict,
            self._run_id,
            self._log_path(name),
            config.seed,
            Concurrency.of(config).max_running,
            self._placement.generators[int(name.removeprefix(GENERATOR))],
        )
        num_ranks = config.generation.tensor_parallel_size
        peer, ranks = await self._spawn(name, GeneratorActor, settings, num_ranks=num_ranks)
        replica = ActorReplica(peer, ranks.slice(procs=0), self._board)
        self._opened.append(replica)
        await replica.open()
        return replica

    async def _start_worker(self, name: str) -> None:
        settings = RolloutWorkerSettings(str(self._run_dir.config), self._log_path(name))
        self.workers.add(*await self._spawn(name, RolloutWorkerActor, settings, self._service))

    async def _spawn(
        self, name: str, actor_class: type[ProcessActor], *arguments: Any, num_ranks: int = 1
    ) -> tuple[Peer, Any]:
        """A process, or a group of them, and the handle of its actor, which has started."""
        peer = Peer(name, self._note_end)
        self._peers[peer.id] = peer
        limit_s = self._config.generation.start_timeout_s
        try:
            spawn = self._supervisor.spawn
            actor = await call(spawn, peer.id, actor_class, arguments, num_ranks, who="supervisor", timeout_s=limit_s)
            peer.watch(await peer.call_all(actor.pid, timeout_s=limit_s))
            await peer.call_all(actor.start, timeout_s=limit_s)
        except TitanRLError as error:
            peer.end(f"it did not start: {reason(error)}")
            raise
        return peer, actor

    def _note_end(self, peer: Peer) -> None:
        del self._peers[peer.id]
        self._ended.put_nowait(peer)

    async def close(self) -> None:
        """End every process."""
        for peer in self._peers.values():
            peer.close()
        for replica in self._opened:
            replica.hang_up()
        with contextlib.suppress(ActorDiedError):
            await call(self._supervisor.terminate, who="supervisor", timeout_s=STOP_TIMEOUT_S)

    @property
    def _run_id(self) -> str:
        return self._run_dir.path.name

    def _log_path(self, name: str) -> str:
        return str(self._run_dir.logs / f"{name}.log")


@contextlib.asynccontextmanager
async def start_cluster(
    config: RunConfig, run_dir: RunDirectory, board: VersionBoard, tell: Callable[[str], object] = logger.info
) -> AsyncIterator[Cluster]:
    """A started cluster, whose processes end with the block.

    Args:
        tell: shows a person which processes die and are there again.

    Raises:
        ActorDiedError: a process did not start in time.
    """
    with stderr_into(run_dir.logs / "monarch.log"):  # it greets its user there when it is first used
        supervisor = this_proc().spawn("supervisor", Supervisor)
        service = this_proc().spawn("generate_service", GenerateService)
    cluster = Cluster(config, run_dir, board, supervisor, service, tell)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()
