"""Generator processes of a run or a server: placed, started, replaced after failures, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from titan_rl.cluster.actor_replica import ActorReplica, AdapterReplica, router_options
from titan_rl.cluster.generator_actor import GeneratorActor, GeneratorPlan
from titan_rl.cluster.hosts.attached_hosts import Hosts
from titan_rl.cluster.hosts.placement import GeneratorPlaces, ProcessPlace
from titan_rl.cluster.hosts.preflight import HostNeeds
from titan_rl.cluster.processes.process import LOOPBACK, ProcessFiles, ProcessSpec, policy_run_id, transport_of
from titan_rl.cluster.processes.remote_process import RemoteProcess, call
from titan_rl.cluster.processes.roles import FIRST_PAUSE_S, LONGEST_PAUSE_S, ProcessId, Respawns, Role
from titan_rl.cluster.processes.sockets import removed_sockets
from titan_rl.cluster.supervision import ProcessFailure, SupervisedProcesses, started
from titan_rl.config.function_names import named_modules
from titan_rl.config.hosts import HostsConfig, Roles, own_address
from titan_rl.config.model_folder import start_limit_s
from titan_rl.config.sections import RoutingConfig, StateDictConfig
from titan_rl.config.serve import ServeConfig
from titan_rl.core.calls.user_code import reason
from titan_rl.core.console import LOG, Console
from titan_rl.core.errors import ActorDiedError, EngineDeadError, EngineStalledError, TitanRLError
from titan_rl.generation.engine import AdapterSpec
from titan_rl.generation.router.replica import Replica
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.router.strategies import Strategy, make_strategy
from titan_rl.weights.types import PublishedWeights, StateDictTransport

T = TypeVar("T")


class ReplicaRouter(Protocol):
    """Router whose replicas the processes add and remove: see `GeneratorRouter`."""

    def has_replica(self, name: str) -> bool: ...

    async def add_replica(self, replica: ActorReplica) -> bool: ...

    def remove_replica(self, name: str) -> None: ...

    async def retire_replica(self, name: str, finish_s: float) -> None: ...


@runtime_checkable
class AdaptersRouter(ReplicaRouter, Protocol):
    """`ReplicaRouter` of several adapters, one of which may be the cause of deaths."""

    def note_death(self, at_work: frozenset[str]) -> None:
        """Note the adapters for which a generator worked when it died."""
        ...

    def stop_cause(self, why: str) -> str | None:
        """Stop the adapter that has caused all deaths so far, and return its name. Returns None if the cause is
        unknown.

        Args:
            why: Reason for the stop, which the adapter's error gives.
        """
        ...


logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Interval for checking whether a host is still present while it ends the rest of a process, in seconds."""


class GeneratorProcesses(SupervisedProcesses):
    """Generators of a run or a server. Each is an actor in its own process. Made by `start_generators`, or as part of
    `RunProcesses`. Implements `HostedProcesses`.

    Attributes:
        router: Router of the requests. Set before `watch`, and before hosts join or leave.

    Args:
        published: Manifests of the versions that the generators pull.
    """

    def __init__(
        self,
        plan: GeneratorPlan,
        routing: RoutingConfig,
        files: ProcessFiles,
        published: PublishedWeights,
        hosts: Hosts,
    ) -> None:
        super().__init__(files, hosts, start_limit_s(plan.model, plan.generation))
        self.replicas: list[ActorReplica]
        self.router: ReplicaRouter
        self._places = GeneratorPlaces(plan.generation)
        self._lost: set[ProcessId] = set()  # without a place
        self._joining: set[ProcessId] = set()  # starting on a host that has joined
        self._losses: dict[str, str] = {}  # reasons by host, of hosts that are lost while processes start
        self._plan = plan
        self._routing = routing
        self._published = published
        self._notify = hosts.notify
        self._respawns = Respawns(hosts.config.max_respawns)
        self._pauses: dict[ProcessId, float] = {}  # before the last start of each process, in seconds
        self._ended: asyncio.Queue[RemoteProcess] = asyncio.Queue()
        self.opened: list[ActorReplica] = []

    def place(self) -> None:
        """Choose the places of all processes."""
        generate = Roles.of(self.hosts.config, self.hosts.names).generate
        self._places.begin(generate, self.hosts.gpus)

    async def start(self) -> None:
        """Start all processes together. If a host is lost meanwhile and enough generators remain, `watch` replaces the
        processes of that host.

        Raises:
            ConfigError: There are too few GPUs.
            ActorDiedError: A process did not start in time, or hosts are lost and too few generators have started.
        """
        self.place()
        async with asyncio.TaskGroup() as starting:
            generators = [
                starting.create_task(self._unless_lost(process, self._start_generator(process)))
                for process in self._first_generators()
            ]
            for other in self._start_others():
                starting.create_task(other)
        self.replicas = [replica for task in generators if (replica := task.result()) is not None]
        least = min(self._plan.generation.least_generators, len(generators))
        if self._losses and len(self.replicas) < least:
            reasons = "; ".join(self._losses.values())
            raise ActorDiedError(
                f"{reasons}; only {len(self.replicas)} generators have started, and generation.num_generators_range "
                f"begins with {least}"
            )
        for host, why in self._losses.items():
            self._notify(f"the run starts without host {host}: {why}")

    async def _unless_lost(self, process: ProcessId, starting: Awaitable[T]) -> T | None:
        """Wait for a process that starts. Returns None if its host is lost meanwhile.

        Raises:
            ActorDiedError: The process does not start, although its host is present.
        """
        host = self._host_of(process)
        try:
            return await starting
        except ActorDiedError as error:
            if host in self.hosts.names:
                raise
            self._losses.setdefault(host, str(error))
            return None

    def _first_generators(self) -> Sequence[ProcessId]:
        """Generators that the run starts with."""
        return [ProcessId(Role.GENERATOR, index) for index in range(self._plan.generation.num_generators)]

    def _start_others(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Start the processes other than generators."""
        return ()

    def make_router(
        self, replicas: Sequence[Replica] | None = None, strategy: Strategy | None = None
    ) -> GeneratorRouter:
        """Make a router of requests.

        Args:
            replicas: Replicas of the router. Defaults to the generators that have been started.
            strategy: Routing strategy. Defaults to the one in the settings.
        """
        return GeneratorRouter(
            self.replicas if replicas is None else replicas,
            strategy or make_strategy(self._routing.strategy),
            on_replica_failed=self.on_replica_failed,
            **router_options(self._plan.generation, self._routing, self._plan.statedict, self.hosts.config.wait_s),
        )

    def waits_for(self) -> str:
        """Describe the generators that do not serve, with the settings that limit how long rollouts wait."""
        names = {remote.name for remote in self._remotes.values() if remote.process.role is Role.GENERATOR}
        starting = sorted(name for name in names if not self.router.has_replica(name))
        lost = ", ".join(sorted(str(process) for process in self._lost if process.role is Role.GENERATOR))
        parts = [f"waiting for a host that joins: {lost}"] if lost else []
        if starting:
            limit = f"generation.start_timeout_s = {self._start_timeout_s:g}"
            parts.append(f"starting, within {limit}: {', '.join(starting)}")
        return "; ".join([*parts, f"rollouts wait for up to hosts.wait_s = {self.hosts.config.wait_s:g}"])

    def on_replica_failed(self, replica: Replica, error: Exception) -> None:
        """Handle the failure of a replica in the router. A dead or hanging engine does not recover, so its process is
        ended even if it lives."""
        scope = ""
        if isinstance(replica, AdapterReplica):
            replica, scope = replica.shared, f" for the adapter {replica.adapter}" if replica.adapter else ""
        if not isinstance(replica, ActorReplica) or replica.remote.reason is not None:
            return
        if isinstance(error, EngineDeadError | EngineStalledError):
            replica.remote.end(reason(error))
        else:
            self._notify(f"{replica.name} is out of service{scope} until it has the current weights: {reason(error)}")

    async def watch(self) -> None:
        """Replace processes that die, until cancelled. Meanwhile the router continues the requests of a dead generator
        on others.

        Raises:
            ActorDiedError: A process died that is not replaced, or more processes died than the setting allows.
        """
        async with asyncio.TaskGroup() as background:

            async def listen() -> None:
                while True:
                    failure: ProcessFailure = await call(self._supervisor.next_failure, who="supervisor")
                    if (remote := self._remotes.get(failure.process_id)) is not None:
                        remote.end(failure.reason)

            background.create_task(listen())
            while True:
                remote = await self._ended.get()
                if self.hosts.takes(self._host_of(remote.process)):
                    self._count_death(remote)
                self._forget(remote)
                background.create_task(self._replace(remote, background))

    async def _replace(self, gone: RemoteProcess, background: asyncio.TaskGroup) -> None:
        """Start a process in place of one that ended, or on another host if its host is gone."""
        process, clock = gone.process, asyncio.get_running_loop().time
        began, host = clock(), self._host_of(process)
        await self._pause(gone)
        clearing = background.create_task(self.clear(gone))
        while not clearing.done() and self.hosts.takes(host):  # a host that is gone does not answer
            await asyncio.wait([clearing], timeout=LOOK_S)
        if not self._place(process):
            self._lost.add(process)
            self._notify(f"{process} is gone: {gone.reason}; no remaining host has room for it")
            return
        if self._host_of(process) != host:
            self._notify(f"{process} is gone: {gone.reason}; starting another on {self._host_of(process)}")
        with contextlib.suppress(TitanRLError):  # the new process ended in turn, and its end is queued
            if await self._restart(process):
                self._notify(f"{process} is running again after {clock() - began:.0f} s")

    async def _pause(self, gone: RemoteProcess) -> None:
        """Wait before the replacement of a process that ended before it had started: its cause may pass."""
        before = self._pauses.pop(gone.process, 0.0)
        if not gone.has_started and self.hosts.takes(self._host_of(gone.process)):
            self._pauses[gone.process] = min(max(2 * before, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            await asyncio.sleep(self._pauses[gone.process])

    def _count_death(self, remote: RemoteProcess) -> None:
        """Count the death of a process. If there are more deaths than allowed and all have the same adapter as their
        cause, that adapter is stopped.

        Raises:
            ActorDiedError: More processes died than the setting allows, and no adapter is known to be the cause.
        """
        role, log = remote.process.role, self._files.logs / f"{remote.name}.log"
        routers = self.router if role is Role.GENERATOR and isinstance(self.router, AdaptersRouter) else None
        if routers is not None:
            routers.note_death(next((each.at_work for each in self.opened if each.remote is remote), frozenset()))
        if not remote.has_started and removed_sockets():  # further attempts would fail, too
            raise ActorDiedError(f"{remote.name} died: {remote.reason}")
        replaced, count = self._respawns.take(role)
        if replaced:
            self._notify(f"{remote.name} died: {remote.reason}; starting another{count}")
            return
        adapter = routers and routers.stop_cause(f"{remote.name} died: {remote.reason}; its log is {log}")
        if adapter is None:
            raise ActorDiedError(f"{remote.name} died: {remote.reason}{count}; its log is {log}")
        self._respawns.reset(role)
        self._notify(f"{remote.name} died: {remote.reason}; starting another, without the adapter {adapter}")

    def _forget(self, remote: RemoteProcess) -> None:
        if self.router.has_replica(remote.name):  # else it died while starting
            self.router.remove_replica(remote.name)

    def _host_of(self, process: ProcessId) -> str:
        return self._places[process.index][0].host

    def _place(self, process: ProcessId) -> bool:
        """Choose a place for a process that ended: its own, or one on another host if its host is gone. Returns whether
        there is one."""
        if self.hosts.takes(self._host_of(process)):
            return True
        gpus = {host: own for host, own in self.hosts.gpus.items() if self.hosts.takes(host)}
        return self._places.move(process.index, gpus, self._trainer_placement())

    def _trainer_placement(self) -> Sequence[ProcessPlace]:
        return ()

    async def join(self, host: str) -> list[str]:
        """Start processes on a host that has joined: first those that have no place, then new ones.

        Returns:
            Names of the processes that serve.
        """
        lost = sorted(process.index for process in self._lost if process.role is Role.GENERATOR)
        chosen = self._places.join(host, self.hosts[host].gpus, lost)
        processes = [*[ProcessId(Role.GENERATOR, index) for index in chosen], *self._others_of(host)]
        self._lost.difference_update(processes)
        serve = await asyncio.gather(*[self._start_joined(process, host) for process in processes])
        return [str(process) for process, serves in zip(processes, serve, strict=True) if serves]

    async def _start_joined(self, process: ProcessId, host: str) -> bool:
        """Start one process on a host that has joined. If that fails, the run continues without it."""
        if host not in self.hosts.names:
            self._lost.add(process)
            return False
        self._joining.add(process)
        try:
            return await self._restart(process)
        except TitanRLError as error:
            self._notify(f"{process} does not start on host {host}: {reason(error)}")
            return False
        finally:
            self._joining.discard(process)

    def _others_of(self, host: str) -> Sequence[ProcessId]:
        """Choose processes other than generators for a host that has joined, and set their places."""
        return ()

    async def leave(self, host: str, why: str) -> None:
        """End the processes on a host once they have finished their work, or after `hosts.drain_s` seconds."""
        limit_s = self.hosts.config.drain_s
        await self._leave(host, why, lambda remote: self._finish(remote, limit_s))

    async def _finish(self, remote: RemoteProcess, limit_s: float) -> None:
        if self.router.has_replica(remote.name):
            await self.router.retire_replica(remote.name, limit_s)

    async def _restart(self, process: ProcessId) -> bool:
        """Start a process again. Returns whether it serves."""
        replica = await self._start_generator(process)
        return replica.remote.reason is None and await self.router.add_replica(replica)

    async def _start_generator(self, process: ProcessId) -> ActorReplica:
        places = self._places[process.index]
        model = self.hosts[places[0].host].path(self._plan.model.path)
        settings = self._plan.settings_of(
            process.index,
            str(model),
            neighbours=self._places.neighbours(process.index),
            beside_trainer=self._places.shares(process.index, self._trainer_placement()),
        )
        remote, ranks = await self.spawn(process, GeneratorActor, settings, places=places)
        replica = ActorReplica(remote, ranks[0], self._published)
        self.opened.append(replica)
        await replica.connect()
        return replica

    def process_ended(self, remote: RemoteProcess) -> None:
        super().process_ended(remote)
        if remote.process in self._joining and not remote.has_started:
            self._lost.add(remote.process)
        else:
            self._ended.put_nowait(remote)

    def _disconnect(self) -> None:
        for replica in self.opened:
            replica.disconnect()


STATEDICT = StateDictConfig()
"""Settings of the weight transport of a server, which cannot be configured."""


@contextlib.asynccontextmanager
async def start_generators(
    config: ServeConfig,
    *,
    version: int,
    max_running: int,
    files: ProcessFiles,
    console: Console = LOG,
    published: PublishedWeights | None = None,
    adapters: Mapping[str, AdapterSpec] | None = None,
) -> AsyncGenerator[GeneratorProcesses]:
    """Context manager: start the generators of a server. They end with the block.

    Args:
        version: Version of the policy that is served.
        max_running: Maximum number of requests that one engine advances at a time.
        files: Folder of the logs. Its parent serves as the run's folder for other hosts.
        console: Shows the user which generators have died and been replaced.
        published: Manifests of the versions that `open_transport` publishes. By default the generators keep the weights
            that they start with.
        adapters: Adapters of the model, by name. Requests that name none are answered by the model itself.

    Raises:
        ActorDiedError: A generator did not start in time, or the worker of a host did not answer.
        ConfigError: A host differs from this machine.
    """
    plan = GeneratorPlan(
        config.model,
        config.generation,
        STATEDICT,
        files.run_id,
        config.seed,
        max_running,
        version,
        adapters=adapters or {},
    )
    make = partial(GeneratorProcesses, plan, config.routing, files, published or PublishedWeights())
    needs = HostNeeds(
        files.logs.parent,
        Path(config.model.path),
        tuple(sorted(named_modules(config))),
        generate_gpus=config.generation.tensor_parallel_size,
        trains=False,
    )
    async with started(files, config.hosts.of_generators_alone, needs, console, make) as processes:
        yield processes


@contextlib.contextmanager
def open_transport(config: HostsConfig, run_id: str, adapter: str = "") -> Generator[StateDictTransport]:
    """Context manager: open the publishing end of a server's weight transport. It is closed after the block.

    Args:
        run_id: The `run_id` of the files with which the generators are started.
        adapter: Adapter whose versions are published. By default those of the whole model are.
    """
    address = own_address(config) if config.elsewhere else LOOPBACK
    # No host has this name, because even generators on this machine may not share this process's memory.
    process = ProcessSpec("server", "titan-rl serve", address, Path())
    transport = transport_of(process, policy_run_id(run_id, adapter), STATEDICT)
    try:
        yield transport
    finally:
        transport.close()
