"""Processes of one run: a trainer, generators and rollout workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from monarch.actor import this_proc

from titan_rl.cluster.generator_actor import GeneratorPlan, adapter_specs
from titan_rl.cluster.generator_processes import GeneratorProcesses
from titan_rl.cluster.hosts.attached_hosts import Hosts
from titan_rl.cluster.hosts.placement import (
    ProcessPlace,
    check_transport,
    choose_transport,
    least_gpu_bytes,
    place_trainer,
    place_trainer_again,
    place_workers,
)
from titan_rl.cluster.processes.process import RunFiles
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.processes.roles import ProcessId, Role
from titan_rl.cluster.rollout_worker import RolloutWorkerActor, RolloutWorkerSettings
from titan_rl.cluster.rollout_worker_pool import GroupService, WorkerPool
from titan_rl.cluster.supervision import SupervisedProcesses, started
from titan_rl.cluster.trainer_processes import TRAINER, TrainerProcesses, gpus_for_training, needs_of, trainer_settings
from titan_rl.config.concurrency import engine_max_running
from titan_rl.config.hosts import Roles
from titan_rl.config.run import RunConfig
from titan_rl.core.console import LOG, Console
from titan_rl.core.errors import ActorDiedError, ConfigError
from titan_rl.weights.transports.registry import find_transport
from titan_rl.weights.types import PublishedWeights

logger = logging.getLogger(__name__)


class RunProcesses(GeneratorProcesses):
    """Trainer, generators and rollout workers of a run. Each is an actor in its own process. Made by `start_processes`.

    Args:
        trains, generates: Whether there is a trainer, and whether there are generators.
        strategy: Pickled strategy of the router, if it is not the one in the settings.
    """

    def __init__(
        self,
        config: RunConfig,
        files: RunFiles,
        published: PublishedWeights,
        hosts: Hosts,
        service: Any,
        *,
        trains: bool,
        generates: bool,
        strategy: bytes | None = None,
    ) -> None:
        self._config = config
        self._strategy = strategy
        self._num_workers = count()  # workers started so far
        self._trains, self._generates = trains, generates
        plan = GeneratorPlan(
            config.model,
            config.generation,
            config.statedict,
            files.run_id,
            config.seed,
            engine_max_running(config),
            sleeps=config.scheduling.on_batch_ready == "sleep",
            adapters=adapter_specs(config),
        )
        super().__init__(plan, config.routing, files, published, hosts)
        self.training: TrainerProcesses
        self.workers = WorkerPool(max_attempts=config.hosts.max_respawns + 1, wait_s=config.hosts.wait_s)
        self._run_files = files
        self._service = service
        self._trainer_places: tuple[ProcessPlace, ...]
        self._worker_places: list[ProcessPlace]
        self._roles: Roles

    def place(self) -> None:
        config, gpus = self._config, self.hosts.gpus
        roles = self._roles = Roles.of(config.hosts, self.hosts.names)
        transport = config.statedict.transport
        check_transport(transport, find_transport(transport), roles, gpus)
        self._trainer_places = place_trainer(config.training, roles.train, gpus)
        self._places.begin(roles.generate, gpus, self._trainer_places)
        self._worker_places = [*place_workers(config.rollout.num_workers, roles.play)]
        if transport == "auto" and self._trains:
            chosen, why = choose_transport(config, self._trainer_places, [*self._places], least_gpu_bytes)
            logger.info("statedict.transport is %s: %s", chosen, why)
            statedict = config.statedict.model_copy(update={"transport": chosen})
            self._plan = replace(self._plan, statedict=statedict)

    def _start_others(self) -> Sequence[Coroutine[Any, Any, None]]:
        first = [_worker(index) for index in range(self._config.rollout.num_workers)]
        workers = [self._unless_lost(worker, self._start_worker(worker)) for worker in first]
        return [*([self._start_trainer()] if self._trains else []), *workers]

    def _first_generators(self) -> Sequence[ProcessId]:
        return super()._first_generators() if self._generates else ()

    def process_ended(self, remote: RemoteProcess) -> None:
        if remote.process == TRAINER:  # its owner restarts it, see `TrainerProcesses.restart`
            SupervisedProcesses.process_ended(self, remote)
        else:
            super().process_ended(remote)

    def _forget(self, remote: RemoteProcess) -> None:
        self.workers.remove(remote)
        super()._forget(remote)

    async def _restart(self, process: ProcessId) -> bool:
        if process.role is Role.GENERATOR:
            return await super()._restart(process)
        await self._start_worker(process)
        return True

    async def _start_trainer(self) -> None:
        config = self._config
        settings = trainer_settings(config, self._run_files, self._plan.statedict, lends_memory=self._plan.sleeps)
        self.training = TrainerProcesses(self, settings, self._place_trainer, wait_s=config.hosts.wait_s)
        while True:
            hosts = {place.host for place in self._trainer_places}
            try:
                await self.training.start()
            except ActorDiedError as error:
                if not hosts - {*self.hosts.names} or not hosts & {*self.hosts.names}:
                    raise
                self._notify(f"the trainer starts without a host that is lost: {error}")
            else:
                return

    def _trainer_placement(self) -> Sequence[ProcessPlace]:
        if not self._trains:
            return ()
        with contextlib.suppress(ConfigError):  # then it keeps its places
            self._place_trainer()
        return self._trainer_places

    def _place_trainer(self) -> Sequence[ProcessPlace]:
        gpus = gpus_for_training(self.hosts, self._run_files)
        self._trainer_places = place_trainer_again(self._config.training, self._trainer_places, gpus, self._places.gpus)
        return self._trainer_places

    def _host_of(self, process: ProcessId) -> str:
        if process.role is Role.ROLLOUT_WORKER:
            return self._worker_places[process.index].host
        return super()._host_of(process)

    def _place(self, process: ProcessId) -> bool:
        """Choose another place for a rollout worker whose host is gone, preferably on a host that does not train and
        has few workers. If the run has as many workers as the settings name without it, it is not replaced."""
        if process.role is not Role.ROLLOUT_WORKER or self.hosts.takes(self._host_of(process)):
            return super()._place(process)
        candidates = [host for host in self.hosts.names if self.hosts.takes(host)] if self._num_lacking() else []
        trains = {place.host for place in self._trainer_places}
        busy = Counter(place.host for place in self._worker_places)
        for host in sorted(candidates, key=lambda host: (host in trains, busy[host]))[:1]:
            self._worker_places[process.index] = ProcessPlace(host)
        return bool(candidates)

    def _num_lacking(self) -> int:
        """Number of rollout workers that the run lacks compared with the settings."""
        workers = [_worker(index) for index in range(len(self._worker_places))]
        num_present = sum(worker not in self._lost and self.hosts.takes(self._host_of(worker)) for worker in workers)
        return max(0, self._config.rollout.num_workers - num_present)

    def _others_of(self, host: str) -> Sequence[ProcessId]:
        """Choose rollout workers for a host that joins: those that the run lacks, and as many as other hosts with
        workers have, if all generating hosts have workers or fewer hosts have workers than `hosts.play`."""
        players, per_host = self._roles.play, -(-self._config.rollout.num_workers // len(self._roles.play))
        playing = {place.host for place in self._worker_places if self.hosts.takes(place.host)}
        plays = {*self._roles.generate} <= {*players} or len(playing) < len(players)
        lost = sorted(process for process in self._lost if process.role is Role.ROLLOUT_WORKER)
        further = [_worker(len(self._worker_places) + index) for index in range(per_host)]
        chosen = [*lost, *further][: max(per_host if plays else 0, min(self._num_lacking(), len(lost)))]
        for worker in chosen:
            self._worker_places[worker.index : worker.index + 1] = [ProcessPlace(host)]
        return chosen

    async def _finish(self, remote: RemoteProcess, limit_s: float) -> None:
        if remote.process == TRAINER:
            await self.training.finish(limit_s)
        else:
            await asyncio.gather(super()._finish(remote, limit_s), self.workers.retire(remote, limit_s))

    async def _start_worker(self, process: ProcessId) -> None:
        place = self._worker_places[process.index]
        host = self.hosts[place.host]
        shard = f"{process}.{next(self._num_workers)}"
        settings = RolloutWorkerSettings(
            host.path(self._run_files.config), host.path(self._config.model.path), shard, self._strategy
        )
        remote, (worker,) = await self.spawn(process, RolloutWorkerActor, settings, self._service, places=[place])
        await self.workers.join(remote, worker, shard)


def _worker(index: int) -> ProcessId:
    return ProcessId(Role.ROLLOUT_WORKER, index)


@contextlib.asynccontextmanager
async def start_processes(
    config: RunConfig,
    files: RunFiles,
    published: PublishedWeights,
    console: Console = LOG,
    *,
    trains: bool = True,
    generates: bool = True,
    strategy: bytes | None = None,
) -> AsyncGenerator[RunProcesses]:
    """Context manager: start the processes of a run. They end with the block.

    Args:
        trains, generates: Whether there is a trainer, and whether there are generators.
        console: Shows the user which processes have died and been replaced.
        strategy: Pickled routing strategy; see `RunProcesses`.

    Raises:
        ActorDiedError: A process did not start in time.
    """

    def make(hosts: Hosts) -> RunProcesses:
        service = this_proc().spawn("group_service", GroupService)
        return RunProcesses(
            config, files, published, hosts, service, trains=trains, generates=generates, strategy=strategy
        )

    async with started(
        files, config.hosts, needs_of(config, files, trains=trains, generates=generates), console, make
    ) as processes:
        yield processes
