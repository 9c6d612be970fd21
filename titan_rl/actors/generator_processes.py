"""Generators in processes of their own: started together, replaced when they die, and ended on every way out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from titan_rl.actors.actor_replica import ActorReplica
from titan_rl.actors.generator_actor import GeneratorActor, GeneratorSettings
from titan_rl.actors.processes.gpus import share_out, visible_gpus
from titan_rl.actors.processes.process import ProcessFiles
from titan_rl.actors.processes.remote_process import RemoteProcess, call
from titan_rl.actors.processes.respawns import RespawnLimit, Respawns
from titan_rl.actors.processes.supervisor import ProcessFailure
from titan_rl.actors.supervised import STOP_TIMEOUT_S, SupervisedProcesses, started
from titan_rl.calls.user_code import reason
from titan_rl.config.sections import GenerationConfig, RoutingConfig, StateDictConfig
from titan_rl.config.serve import ServeConfig
from titan_rl.errors import ActorDiedError, EngineDeadError, EngineStalledError, GenerationError
from titan_rl.generation.registry import EngineSpec
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.registry import make_strategy
from titan_rl.generation.router.replica import Replica
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.router.strategies import Strategy
from titan_rl.training.settings import ModelConfig
from titan_rl.weights.published_weights import PublishedWeights

logger = logging.getLogger(__name__)

GENERATOR = "generator-"


class GeneratorProcesses(SupervisedProcesses):
    """The generators that settings describe, each an actor in a process of its own. Made by `start_generators`.

    Args:
        version: of the weights in the model's folder.
        max_running: most requests one engine advances at a time.
        supervisor: the `Supervisor` of the processes.
        tell: shows a person which processes die and are there again.
    """

    def __init__(
        self,
        model: ModelConfig,
        generation: GenerationConfig,
        routing: RoutingConfig,
        statedict: StateDictConfig,
        *,
        seed: int,
        version: int = 0,
        max_running: int,
        files: ProcessFiles,
        published: PublishedWeights,
        supervisor: Any,
        tell: Callable[[str], object],
    ) -> None:
        self.replicas: list[ActorReplica]
        self._gpus: tuple[tuple[str, ...], ...]  # of each generator
        self._model = model
        self._generation = generation
        self._routing = routing
        self._statedict = statedict
        self._seed = seed
        self._version = version
        self._max_running = max_running
        super().__init__(files, supervisor, generation.start_timeout_s)
        self._published = published
        self._tell = tell
        self._respawns = Respawns(self._respawn_limits())
        self._ended: asyncio.Queue[RemoteProcess] = asyncio.Queue()
        self._opened: list[ActorReplica] = []

    def _respawn_limits(self) -> dict[str, RespawnLimit]:
        return {GENERATOR: RespawnLimit("generation.max_respawns", self._generation.max_respawns)}

    def _assign_gpus(self, gpus: Sequence[str]) -> None:
        self._gpus = share_out(self._generation, gpus)

    async def start(self) -> None:
        """Start all processes at once.

        Raises:
            ConfigError: there are GPUs, and too few of them.
            ActorDiedError: one did not start within `generation.start_timeout_s`.
        """
        self._assign_gpus(visible_gpus())
        async with asyncio.TaskGroup() as starting:
            generators = [starting.create_task(self._start_generator(name)) for name in self._generator_names()]
            for other in self._start_others():
                starting.create_task(other)
        self.replicas = [task.result() for task in generators]

    def _generator_names(self) -> Sequence[str]:
        """Of those that are started."""
        return [f"{GENERATOR}{index}" for index in range(self._generation.num_generators)]

    def _start_others(self) -> Sequence[Coroutine[Any, Any, None]]:
        """What is started beside the generators."""
        return ()

    def make_router(
        self, replicas: Sequence[Replica] | None = None, strategy: Strategy | None = None
    ) -> GeneratorRouter:
        """
        Args:
            replicas: by default the generators that have been started.
            strategy: by default the one that settings name.
        """
        return GeneratorRouter(
            self.replicas if replicas is None else replicas,
            strategy or make_strategy(self._routing.strategy, self._routing.max_sessions),
            stall_timeout_s=self._generation.stall_timeout_s,
            on_replica_failed=self.on_replica_failed,
            limits=Limits(pull_s=self._statedict.pull_timeout_s, no_replica_s=self._generation.start_timeout_s),
        )

    def on_replica_failed(self, replica: Replica, error: Exception) -> None:
        """For the router: an engine that has ended or hangs does not come back, though its process lives."""
        if not isinstance(replica, ActorReplica) or replica.remote.reason is not None:
            return
        if isinstance(error, EngineDeadError | EngineStalledError):
            replica.remote.end(reason(error))
        else:
            self._tell(f"{replica.name} is out of service until it has the current weights: {reason(error)}")

    async def watch(self, router: GeneratorRouter) -> None:
        """Replace processes that die, until cancelled. The router has the requests of a dead generator go on elsewhere
        meanwhile.

        Raises:
            ActorDiedError: one died that is not replaced, or one more than its setting allows.
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
                    if await self._restart(gone.name, router):
                        self._tell(
                            f"{gone.name} is there again after {asyncio.get_running_loop().time() - began:.0f} s"
                        )

            background.create_task(listen())
            while True:
                remote = await self._ended.get()
                replaced, count = self._respawns.take(remote.name)
                if not replaced:
                    log = self._files.logs / f"{remote.name}.log"
                    raise ActorDiedError(f"{remote.name} died: {remote.reason}{count}; its log is {log}")
                logger.warning("%s died: %s; starting another%s", remote.name, remote.reason, count)
                self._tell(f"{remote.name} died: {remote.reason}; starting another{count}")
                self._forget(remote, router)
                background.create_task(respawn(remote))

    def _forget(self, remote: RemoteProcess, router: GeneratorRouter) -> None:
        if remote.name in {replica.name for replica in router.replicas}:  # else it died while it started
            router.remove_replica(remote.name)

    async def _restart(self, name: str, router: GeneratorRouter) -> bool:
        """Whether another is there in the place of the one that died."""
        replica = await self._start_generator(name)
        return replica.remote.reason is None and await router.add_replica(replica)

    async def _start_generator(self, name: str) -> ActorReplica:
        generation, index = self._generation, int(name.removeprefix(GENERATOR))
        engine = EngineSpec(
            self._model.path,
            dtype=self._model.dtype,
            max_context=self._model.max_context,
            max_running=self._max_running,
            kv_cache_gib=generation.kv_cache_gib,
            seed=self._seed,
            routed_experts=generation.return_routed_experts,
            tensor_parallel_size=generation.tensor_parallel_size,
            generator=index,
        )
        settings = GeneratorSettings(
            engine,
            generation,
            self._statedict,
            self._files.run_id,
            self.log_path(name),
            self._gpus[index],
            self._version,
        )
        num_ranks = generation.tensor_parallel_size
        remote, ranks = await self.spawn(name, GeneratorActor, settings, num_ranks=num_ranks)
        replica = ActorReplica(remote, ranks.slice(procs=0), self._published)
        self._opened.append(replica)
        await replica.connect()
        return replica

    def _note_end(self, remote: RemoteProcess) -> None:
        super()._note_end(remote)
        self._ended.put_nowait(remote)

    def _disconnect(self) -> None:
        for replica in self._opened:
            replica.disconnect()


@contextlib.asynccontextmanager
async def start_generators(
    config: ServeConfig,
    *,
    version: int,
    max_running: int,
    files: ProcessFiles,
    tell: Callable[[str], object] = logger.info,
) -> AsyncGenerator[GeneratorProcesses]:
    """The generators of a server, which end with the block. They keep the weights that they start with.

    Args:
        version: of the policy that is served.
        max_running: most requests one engine advances at a time.
        tell: shows a person which of them die and are there again.

    Raises:
        ActorDiedError: one did not start in time.
    """

    def make(supervisor: Any) -> GeneratorProcesses:
        return GeneratorProcesses(
            config.model,
            config.generation,
            config.routing,
            StateDictConfig(),
            seed=config.seed,
            version=version,
            max_running=max_running,
            files=files,
            published=PublishedWeights(),
            supervisor=supervisor,
            tell=tell,
        )

    async with started(files.logs, make) as processes:
        yield processes
