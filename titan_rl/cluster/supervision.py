"""Process supervision: the actor that spawns processes and reports failures, and the base class of process groups."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import monarch.actor
from monarch.actor import (
    Actor,
    HostMesh,
    MeshFailure,
    ProcMesh,
    attach_to_workers,
    concurrent_endpoint,
    default_bootstrap_cmd,
    this_host,
    this_proc,
)

from titan_rl.cluster.hosts.attached_hosts import Hosts, open_hosts
from titan_rl.cluster.hosts.lifecycle import HostListener, HostRecord, HostState
from titan_rl.cluster.hosts.placement import ProcessPlace
from titan_rl.cluster.hosts.preflight import HostNeeds
from titan_rl.cluster.liveness.health_check import ProcessorTime
from titan_rl.cluster.processes.actor_calls import ActorHandle, AnsweringActor
from titan_rl.cluster.processes.fork_server import bootstrap_command, servers_of_run
from titan_rl.cluster.processes.process import LOOPBACK, ProcessActor, ProcessFiles, ProcessSpec, stderr_into
from titan_rl.cluster.processes.remote_process import NoAnswerError, RemoteProcess, call, last_line
from titan_rl.cluster.processes.roles import ProcessId, Role
from titan_rl.cluster.processes.sockets import removed_sockets
from titan_rl.config.hosts import HostsConfig
from titan_rl.core.calls.recorded_code import loaded_code
from titan_rl.core.calls.user_code import reason
from titan_rl.core.console import Console
from titan_rl.core.errors import ActorDiedError, TitanRLError
from titan_rl.core.tracing.spans import tracing_of_children

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 20.0


def _log_fault(failure: MeshFailure) -> None:
    logger.warning("monarch: %s", failure)


# A message sent while its receiver dies is reported twice: to the call, which fails, and to the root client, which by
# default ends the whole process. Here the owner of the call decides instead.
monarch.actor.unhandled_fault_hook = _log_fault


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """Unexpected end of the process spawned as `process_id`, or of its actor, found by Monarch."""

    process_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Spawned:
    host: str | None  # name under which it is attached; None is this machine
    process: ProcMesh


class Supervisor(Actor):
    """Actor in the controller's process that spawns all other processes. The death of a child ends no other process:
    `next_failure` reports it, and calls in flight to it fail. Processes are named by the ids of their `RemoteProcess`;
    the processes of a group share one id.

    Args:
        servers: Folder of the fork servers for processes on this machine.
    """

    def __init__(self, servers: Path | None = None) -> None:
        self._servers = servers
        self._hosts: dict[str, HostMesh] = {}
        self._processes: dict[str, list[_Spawned]] = {}  # by their ids
        self._stops: dict[asyncio.Task[None], str | None] = {}  # in progress, with the host of each
        self._ids: dict[str, str] = {}  # by Monarch's names of the processes
        self._failures: asyncio.Queue[ProcessFailure] = asyncio.Queue()

    def __supervise__(self, failure: MeshFailure) -> bool:
        name = failure.mesh_name.rsplit("-", 1)[0]  # Monarch appends a random suffix
        if name in self._ids:
            self._failures.put_nowait(ProcessFailure(self._ids[name], last_line(str(failure))))
        return True

    @concurrent_endpoint
    async def attach(self, host: str, worker: str) -> None:
        """Attach the Monarch of another machine, at `tcp://HOST:PORT`, under a name for `spawn`. Monarch never delivers
        anything to the address of a host that was lost, even if a new process listens there."""
        self._hosts[host] = attach_to_workers(ca="trust_all_connections", workers=[worker])

    @concurrent_endpoint
    async def detach(self, host: str) -> None:
        """Detach a machine without ending or waiting for its processes, because a lost one cannot confirm their end."""
        self._hosts.pop(host, None)
        for process_id, spawned in self._processes.items():
            self._processes[process_id] = [process for process in spawned if process.host != host]
        for stop, stop_host in self._stops.items():
            if stop_host == host:
                stop.cancel()

    @concurrent_endpoint
    async def spawn(
        self,
        process_id: str,
        actor_class: type[Actor],
        args: tuple[Any, ...],
        rank: int = 0,
        host: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Any:
        """Start a process that holds one actor.

        Args:
            rank: Number of the process among those with this id.
            host: Name of an attached host. Defaults to this machine.
            environment: Variables of the process, in addition to those of its host.

        Returns:
            Handle of the actor; for an `AnsweringActor` it is an `ActorHandle`.
        """
        name = f"{process_id}-rank{rank}" if rank else process_id
        if host is None:
            mesh, kind = this_host(), getattr(actor_class, "fork_kind", None)
            command = await bootstrap_command(self._servers, kind, environment or {})
        else:
            mesh, command = self._hosts[host], default_bootstrap_cmd().with_env(dict(environment or {}))
        processes = mesh.spawn_procs({"procs": 1}, name=name, bootstrap_command=command)
        self._processes.setdefault(process_id, []).append(_Spawned(host, processes))
        self._ids[name] = process_id
        await processes.initialized  # otherwise a host that does not answer would block this actor
        actor = processes.spawn(name, actor_class, *args)
        await actor.initialized
        return ActorHandle(actor) if issubclass(actor_class, AnsweringActor) else actor

    @concurrent_endpoint
    async def next_failure(self) -> ProcessFailure:
        """Wait for the next failure. A process may be reported more than once."""
        return await self._failures.get()

    @concurrent_endpoint
    async def terminate(self, process_ids: tuple[str, ...] | None = None) -> None:
        """End the processes with these ids, or all. Processes that are already dead are ignored."""
        chosen = tuple(self._processes) if process_ids is None else process_ids
        async with asyncio.TaskGroup() as stops:
            for process_id in chosen:
                self._ids = {name: id for name, id in self._ids.items() if id != process_id}
                for spawned in self._processes.pop(process_id, ()):
                    stop = stops.create_task(_stop(spawned.process))
                    self._stops[stop] = spawned.host
                    stop.add_done_callback(self._stops.pop)


async def _stop(process: Any) -> None:
    with contextlib.suppress(Exception):  # a dead process cannot be stopped twice
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.stop()


TERMINATE_TIMEOUT_S = 30.0


class SupervisedProcesses(HostListener):
    """Spawns processes on the hosts of a run and ends them.

    Attributes:
        hosts: Hosts of the run.

    Args:
        start_timeout_s: Longest time that a process may take to start, in seconds.
    """

    def __init__(self, files: ProcessFiles, hosts: Hosts, start_timeout_s: float) -> None:
        self._files = files
        self._code = loaded_code()  # of the user, for processes that start later
        self.hosts = hosts
        self._supervisor = hosts.supervisor
        self._start_timeout_s = start_timeout_s
        self._remotes: dict[str, RemoteProcess] = {}  # by id, of those not known to have ended
        self._spawned: list[str] = []  # ids
        self._hang_timeout_s = hosts.config.hang_timeout_s
        self._ended_time: defaultdict[Role, ProcessorTime] = defaultdict(ProcessorTime)  # of processes that have ended
        hosts.lifecycles.subscribe(self)

    async def start(self) -> None:
        """Start the processes."""
        raise NotImplementedError

    async def spawn(
        self, process: ProcessId, actor_class: type[ProcessActor], *arguments: Any, places: Sequence[ProcessPlace]
    ) -> tuple[RemoteProcess, list[Any]]:
        """Start one process in each of these places. They form a group that lives and dies together.

        Args:
            arguments: Arguments of each actor, after its `ProcessSpec`.

        Returns:
            The remote process, and the handles of the started actors by rank.

        Raises:
            ActorDiedError: A process did not start in time, or failed with an error that is not a `TitanRLError`.
            TitanRLError: A process failed to start with this error. After any error, the whole group has ended.
        """
        remote = RemoteProcess(process, self, self._hang_timeout_s, [place.host for place in places])
        self._remotes[remote.id] = remote
        self._spawned.append(remote.id)
        limit_s = self._start_timeout_s
        try:
            group = await self._rendezvous(remote, places)
            spawn = partial(self._spawn_rank, remote, group, actor_class, arguments)
            ranks = await asyncio.gather(*[spawn(rank, place) for rank, place in enumerate(places)])
            pids = await remote.call_all([rank.pid for rank in ranks], timeout_s=limit_s)
            for pid, place in zip(pids, places, strict=True):
                remote.watch([pid], self.hosts[place.host].watcher)
            await remote.call_all([rank.start for rank in ranks], timeout_s=limit_s)
        except NoAnswerError as error:
            late = (
                f"it did not start within generation.start_timeout_s = {limit_s:g}; increase it if it was still loading"
            )
            remote.end(late)
            await self.clear(remote)
            raise ActorDiedError(f"{process} died: {late}", excused=remote.excused) from error
        except Exception as error:
            remote.end(f"it did not start: {removed_sockets() or reason(error)}")
            await self.clear(remote)
            if isinstance(error, TitanRLError):
                raise
            raise ActorDiedError(f"{process} died: {remote.reason}", excused=remote.excused) from error
        remote.has_started = True
        return remote, ranks

    async def clear(self, remote: RemoteProcess, timeout_s: float = TERMINATE_TIMEOUT_S) -> None:
        """End the rest of a process or its group. Continues in the background if that takes longer than `timeout_s`."""
        with contextlib.suppress(ActorDiedError):
            await call(self._supervisor.terminate, (remote.id,), who="supervisor", timeout_s=timeout_s)

    async def _spawn_rank(
        self,
        remote: RemoteProcess,
        group: Mapping[str, str],
        actor_class: type[ProcessActor],
        arguments: tuple[Any, ...],
        rank: int,
        place: ProcessPlace,
    ) -> Any:
        host = self.hosts[place.host]
        tracing = tracing_of_children()
        if tracing is not None:
            tracing = replace(tracing, folder=str(host.path(tracing.folder)))
            if host.clocks is not None:
                tracing = tracing.on_host(host.clocks.steady_ns)
        logs, code = host.path(self._files.logs), self._code
        spec = ProcessSpec(remote.name, host.name, host.address, logs, rank, tracing, host.ping_socket, code)
        environment = {**host.environment, **group, **_variables_of(place)}
        if group:
            environment["RANK"] = str(rank)
        order = (remote.id, actor_class, (spec, *arguments), rank, host.key, environment)
        return await remote.call(self._supervisor.spawn, *order, timeout_s=self._start_timeout_s)

    async def _rendezvous(self, remote: RemoteProcess, places: Sequence[ProcessPlace]) -> dict[str, str]:
        """Environment with the rendezvous address of a torch.distributed group; empty for a single rank."""
        if len(places) == 1:
            return {}
        first = self.hosts[places[0].host]
        address = first.address if len({place.host for place in places}) > 1 else LOOPBACK
        port = await remote.call(first.agent.free_port, timeout_s=self._start_timeout_s)
        return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(places))}

    async def close(self) -> None:
        """End every process. The trainer and the generators have released all shared resources and are killed, because
        Monarch would wait seconds for their interpreters. Rollout workers run user code and are terminated
        gracefully."""
        for remote in self._remotes.values():
            if remote.process.role is Role.ROLLOUT_WORKER:
                remote.close()
            else:
                remote.kill()
        self._disconnect()
        with contextlib.suppress(ActorDiedError):
            ids = tuple(self._spawned)
            await call(self._supervisor.terminate, ids, who="supervisor", timeout_s=TERMINATE_TIMEOUT_S)

    @property
    def num_cores(self) -> int:
        """Number of processor cores that the processes of the run may use, on all its hosts."""
        return self.hosts.num_cores

    def processor_times(self) -> dict[Role, ProcessorTime]:
        """Processor time so far by role, including that of processes that have ended. Roles whose processes have not
        answered a ping are left out."""
        times = self._ended_time.copy()
        for remote in self._remotes.values():
            times[remote.process.role] += remote.processor_time
        return {role: time for role, time in times.items() if time.total_s}

    def names_by_host(self) -> dict[str, list[str]]:
        """Sorted names of the processes on each host that has any."""
        names: defaultdict[str, list[str]] = defaultdict(list)
        for remote in self._remotes.values():
            for host in remote.hosts:
                names[host].append(remote.name)
        return {host: sorted(names_here) for host, names_here in names.items()}

    def _remotes_on(self, host: str) -> list[RemoteProcess]:
        return [remote for remote in self._remotes.values() if host in remote.hosts]

    async def _leave(self, host: str, why: str, finish: Callable[[RemoteProcess], Awaitable[object]]) -> None:
        """End the processes on a host that is drained, once each of them has finished its work."""
        leaving = self._remotes_on(host)
        await asyncio.gather(*[finish(remote) for remote in leaving])
        for remote in leaving:
            remote.end(f"host {host} is drained: {why}", excused=True)
            await self.clear(remote)

    def host_changed(self, record: HostRecord, before: HostState) -> None:
        """End all processes on a host that is lost, including those that are still starting."""
        if record.state is HostState.LOST:
            for remote in self._remotes_on(record.name):
                remote.end(f"host {record.name} is lost: {record.reason}", excused=True)

    def _disconnect(self) -> None:
        """Release the connections to the processes before they are ended."""

    def process_held(self, remote: RemoteProcess, what: str) -> None:
        self.hosts.notify(f"{remote.name}: {what}")

    def process_ended(self, remote: RemoteProcess) -> None:
        self._ended_time[remote.process.role] += remote.processor_time
        del self._remotes[remote.id]


P = TypeVar("P", bound=SupervisedProcesses)


def _variables_of(place: ProcessPlace) -> dict[str, str]:
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)} if place.gpus else {}
    return {**gpus, "LOCAL_RANK": str(place.local_rank)}


@contextlib.asynccontextmanager
async def started(
    files: ProcessFiles,
    config: HostsConfig,
    needs: HostNeeds,
    console: Console,
    make: Callable[[Hosts], P],
) -> AsyncGenerator[P]:
    """Context manager: open the hosts, and start processes on them. They end with the block.

    Args:
        make: Makes the processes, given the hosts on which they run.

    Raises:
        ActorDiedError: A process did not start in time, or the worker of a host did not answer.
        ConfigError: A host differs from this machine.
    """
    with stderr_into(files.logs / "monarch.log"):  # Monarch writes a greeting to stderr when it is first used
        supervisor = this_proc().spawn("supervisor", Supervisor, servers_of_run())
    try:
        async with open_hosts(config, supervisor, needs, console) as hosts:
            processes = make(hosts)
            try:
                await processes.start()
                yield processes
            finally:
                await processes.close()
    finally:
        with contextlib.suppress(ActorDiedError):
            await call(supervisor.terminate, who="supervisor", timeout_s=TERMINATE_TIMEOUT_S)
