"""One host of a run: the connection to its worker, its preparation, and its handle once it is part of the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from titan_rl.cluster.hosts.agent import HostAgent, RunOnHost
from titan_rl.cluster.hosts.folders import ENVIRONMENT, chunks_of, code_files, model_files
from titan_rl.cluster.hosts.lifecycle import HostRecord
from titan_rl.cluster.hosts.preflight import ClockDifference, FactsRequest, HostFacts, compare_clocks
from titan_rl.cluster.liveness.health_check import LocalHealthChecks, Watcher
from titan_rl.cluster.liveness.heartbeat import (
    BEAT_S,
    GREETING_S,
    LONGEST_LINE,
    RemoteWatcher,
    SilenceTimer,
    receive,
    send,
)
from titan_rl.cluster.processes.remote_process import RemoteProcess, call
from titan_rl.config.hosts import split_address
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.console import Console
from titan_rl.core.errors import ActorDiedError, ConfigError


@dataclass(slots=True)
class Host:
    """Handle of a host that is part of a run.

    Attributes:
        name: Hostname, made unique in the run.
        address: Address by which the other hosts of the run reach it.
        agent: Handle of its `HostAgent`.
        gpus: Its GPUs, named as in CUDA_VISIBLE_DEVICES.
        num_cores: Number of its processor cores that the run may use.
        key: Name of the host for the `Supervisor`; None for this machine.
        folders: Folders of this machine that have a different path on the host, with that path.
        environment: Variables of its processes, in addition to those of its worker.
        watcher: Reports the ends and the health of its processes.
        worker: HOST:PORT where its worker listens; "" for this machine.
        worker_id: Identity of that worker. A restarted worker has another.
        ping_socket: Socket on the host where its processes answer pings; None if there are no health checks.
        clocks: Offset of its clocks when it joined; None for this machine.
        link: Makes calls that fail at once when the host is lost.
    """

    name: str
    address: str
    agent: Any
    gpus: tuple[str, ...] = ()
    num_cores: int = 0
    key: str | None = None
    folders: Mapping[Path, Path] = field(default_factory=dict[Path, Path])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    watcher: Watcher = field(default_factory=LocalHealthChecks)
    worker: str = ""
    worker_id: str = ""
    ping_socket: Path | None = None
    clocks: ClockDifference | None = None
    link: RemoteProcess = field(init=False)

    def __post_init__(self) -> None:
        self.link = RemoteProcess(f"host {self.name}")

    @property
    def is_here(self) -> bool:
        """Whether this is the controller's machine."""
        return self.key is None

    def path(self, path: str | Path) -> Path:
        """Path on the host of a file of this machine."""
        path = Path(path)
        for local, remote in self.folders.items():
            if path.is_relative_to(local):
                return remote / path.relative_to(local)
        return path

    def search_path(self, folders: str) -> str:
        """Translate each folder of a PYTHONPATH; see `path`."""
        return os.pathsep.join(str(self.path(folder)) for folder in folders.split(os.pathsep))


REACH_TIMEOUT_S = 5.0
MONARCH_TIMEOUT_S = 30.0

T = TypeVar("T")


class WorkerConnection:
    """Connection to a worker, used from the first contact until the watchdog of the host takes over.

    Attributes:
        worker: HOST:PORT in the settings.
        address: Address of the host.
        has_answered: Whether the worker has answered.
        id: Identity of the worker, once it has answered. A restarted worker has another.
        link: Makes calls that fail at once when the worker ends or sends nothing for `silence_s` seconds.
    """

    def __init__(
        self,
        run: str,
        worker: str,
        address: str,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        silence_s: float,
        name: str,
    ) -> None:
        self.worker = worker
        self.address = address
        self.has_answered = False
        self.id = ""
        self._is_busy = False
        self.link = RemoteProcess(f"host at {worker}")
        self._reader, self._writer = streams
        send(self._writer, {"run": run, "name": name, "worker": worker})
        self._silence_s = silence_s
        self._silence = SilenceTimer(silence_s, 2 * BEAT_S, asyncio.get_running_loop().time())
        self._monarch: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._parts = [asyncio.ensure_future(part) for part in (self._listen(), self._look())]

    async def monarch(self) -> str:
        """Return the address at which a Monarch process for this run listens on the host.

        Raises:
            ActorDiedError: The worker ended, does not answer in time, or is busy with another run.
            ConfigError: The run already uses this worker under another address.
        """
        try:
            async with self.link.alive(MONARCH_TIMEOUT_S):
                return await self._monarch
        except ActorDiedError:
            if self._is_busy and self.link.reason is None:
                raise ActorDiedError(
                    f"the worker at {self.worker} is in use by another run, and serves one run at a time: stop that "
                    "run first, or use other workers"
                ) from None
            if self.has_answered:
                raise
            raise ActorDiedError(
                f"the process that listens at {self.worker} does not respond like a worker of this titan_rl version; "
                f"check which process it is, and start `titan-rl worker --listen {self.worker}` there"
            ) from None

    async def is_lost(self) -> bool:
        """Return whether the host is gone. This may take a moment to determine."""
        try:
            async with asyncio.timeout(self._silence_s + REACH_TIMEOUT_S):
                await self.link.ended.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        for part in self._parts:
            part.cancel()
        self._writer.close()

    async def _listen(self) -> None:
        try:
            while True:
                message = await receive(self._reader)
                self._silence.reset()
                self.has_answered = True
                self.id = str(message.get("id", ""))
                self._is_busy = bool(message.get("busy"))
                if (known := message.get("known")) and not self._monarch.done():
                    problem = f"{known} and {self.worker} are the same worker, which this run uses; list it once"
                    self._monarch.set_exception(ConfigError(problem))
                    self._monarch.exception()  # marks it as retrieved
                if message.get("monarch") and not self._monarch.done():
                    self._monarch.set_result(str(message["monarch"]))
        except ConnectionError:
            self.link.end("its worker has ended")

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(BEAT_S)
            if self._silence.look(clock()):
                break
        self.link.end(f"no heartbeat for {self._silence_s:g} s")


async def connect_to_worker(run: str, worker: str, silence_s: float, name: str = "") -> WorkerConnection:
    """Connect to a worker.

    Args:
        run: Unique id of the run.
        worker: HOST:PORT.
        silence_s: Longest time without a heartbeat of the worker, in seconds.
        name: Name of the run, for people.

    Raises:
        ActorDiedError: Nobody listens at this address.
    """
    address, streams = await _reach(worker)
    return WorkerConnection(run, worker, address, streams, silence_s, name)


async def worker_id_at(worker: str) -> str:
    """Return the identity of the worker that listens at HOST:PORT now; see `WorkerConnection.id`.

    Raises:
        ActorDiedError: No worker listens there.
    """
    _, (reader, writer) = await _reach(worker)
    try:
        send(writer, {})
        async with asyncio.timeout(REACH_TIMEOUT_S):
            return str((await receive(reader)).get("id", ""))
    except (OSError, TimeoutError):
        raise ActorDiedError(f"the process that listens at {worker} does not respond like a worker") from None
    finally:
        writer.close()


async def _reach(worker: str) -> tuple[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Resolve the address of a worker's host, and connect to the worker.

    Raises:
        ActorDiedError: Nobody listens at this address, or the hostname cannot be resolved.
    """
    host, port = split_address(worker)
    try:
        address = await in_thread(resolve, host)
        async with asyncio.timeout(REACH_TIMEOUT_S):
            return address, await asyncio.open_connection(address, port, limit=LONGEST_LINE)
    except (OSError, TimeoutError) as error:
        raise ActorDiedError(
            f"no worker at {worker}: it cannot be reached: {_why(error)}; "
            f"start `titan-rl worker --listen {worker}` there"
        ) from None


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    return "no answer" if error.errno is None else os.strerror(error.errno)


def free_names(hostnames: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Choose a name for each host: its hostname, with a number if another host has that name.

    Example: `free_names(["a", "b", "a"], ["b"])` is `["a", "b-2", "a-2"]`.
    """
    names: list[str] = []
    for hostname in hostnames:
        tries = (hostname if number == 1 else f"{hostname}-{number}" for number in count(1))
        names.append(next(name for name in tries if name not in (*taken, *names)))
    return names


def resolve(host: str) -> str:
    """Resolve a hostname, preferably to an IPv4 address.

    Raises:
        OSError: The hostname has no address.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return str(address[0])


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results. The first that fails cancels the others, and its error is
    raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


ATTACH_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0


class JoiningHost:
    """A host that joins a run: `look`, `become`, `prepare` and `watch` are called in this order. Its worker must send
    heartbeats throughout.

    Attributes:
        key: Name of the host for the supervisor.
        record: State and name of the host.
        worker: HOST:PORT of its worker.
        facts: Facts of the host, set by `look`.
        clocks: Offset from this machine's clocks, set by `look`.
        host: Handle of the host, set by `become`.
        left_out: Reason why the run starts without the host; "" otherwise.

    Args:
        silence_s: Longest time without a heartbeat of its worker, in seconds.
    """

    facts: HostFacts
    clocks: ClockDifference
    host: Host

    def __init__(self, supervisor: Any, key: str, record: HostRecord, silence_s: float) -> None:
        self.key = key
        self.record = record
        self.worker = record.address
        self.left_out = ""
        self._supervisor = supervisor
        self._silence_s = silence_s
        self._connection: WorkerConnection | None = None
        self._agent: Any = None

    async def look(self, question: FactsRequest) -> None:
        """Connect to the worker, start the agent, and collect the facts of the host.

        Raises:
            ActorDiedError: No worker answers, or the agent does not start.
        """
        connection = self._connection = await connect_to_worker(
            question.token, self.worker, self._silence_s, question.run_dir.name
        )
        ask = connection.link.call
        await ask(self._supervisor.attach, self.key, await connection.monarch(), timeout_s=ATTACH_TIMEOUT_S)
        order = self.key, HostAgent, (), 0, self.key
        self._agent = await ask(self._supervisor.spawn, *order, timeout_s=ATTACH_TIMEOUT_S)
        await ask(self._agent.enter, timeout_s=ATTACH_TIMEOUT_S)
        self.facts = await ask(self._agent.look, question, timeout_s=ATTACH_TIMEOUT_S)
        self.clocks = await compare_clocks(lambda: ask(self._agent.clocks, timeout_s=ATTACH_TIMEOUT_S))

    def become(self, name: str) -> None:
        """Give the host its name, and make its handle."""
        assert self._connection is not None
        self.host = Host(
            name,
            self._connection.address,
            self._agent,
            self.facts.gpus,
            self.facts.num_cores,
            self.key,
            worker=self.worker,
            clocks=self.clocks,
        )
        self.host.worker_id = self._connection.id
        self.host.link = self._connection.link
        self.record.name, self.record.host = name, self.host

    async def prepare(self, run_dir: Path) -> None:
        """Create the folders of the run on the host.

        Raises:
            ActorDiedError: The host is gone.
        """
        host = self.host
        order = run_dir if self.facts.sees_run else None, _settings_in(run_dir), host.address
        made: RunOnHost = await host.link.call(self._agent.prepare, *order, timeout_s=ATTACH_TIMEOUT_S)
        if made.run_dir != run_dir:
            host.folders = {run_dir: made.run_dir}
        host.environment = _environment(host, made)

    async def copy_missing_files(self, question: FactsRequest, expected: HostFacts, console: Console) -> None:
        """Copy the model and the code to the host if it lacks them.

        Raises:
            ActorDiedError: The host is gone.
        """
        host, facts = self.host, self.facts
        lacking = [] if facts.model == expected.model else [(question.model, model_files(question.model))]
        if facts.missing.keys() - expected.missing.keys():
            folders = [Path(folder) for folder in question.pythonpath]
            lacking += [(folder, await in_thread(code_files, folder)) for folder in folders if folder.is_dir()]
        for number, (folder, files) in enumerate(lacking):
            size = sum(path.stat().st_size for path in files)
            console.message(f"copying {folder}, {size / (1 << 20):.1f} MiB, to {host.name}")
            chunks = chunks_of(folder, files)
            while (chunk := await in_thread(next, chunks, None)) is not None:
                remote = await host.link.call(self._agent.receive, number, *chunk, timeout_s=ATTACH_TIMEOUT_S)
                host.folders = {**host.folders, folder: remote}
        if python_path := os.environ.get("PYTHONPATH"):
            host.environment = {**host.environment, "PYTHONPATH": host.search_path(python_path)}

    async def watch(self, watcher: RemoteWatcher) -> None:
        """Start the watchdog on the host, and close the connection to the worker once the first heartbeat has arrived.

        Raises:
            ActorDiedError: The host is gone.
        """
        host = self.host
        host.watcher = watcher
        begin = self._agent.start_watchdog
        host.ping_socket = await host.link.call(begin, watcher.settings, timeout_s=ATTACH_TIMEOUT_S)
        async with host.link.alive(GREETING_S):
            await watcher.first_heartbeat.wait()
        self._disconnect()

    @property
    def has_answered(self) -> bool:
        """Whether its worker has answered."""
        return self._connection is not None and self._connection.has_answered

    async def is_lost(self) -> bool:
        """Whether it was in contact and is lost. This may take a moment to determine."""
        return self._connection is not None and self.has_answered and await self._connection.is_lost()

    @property
    def lost(self) -> str:
        """Reason why the host is lost; "" while it is not known to be."""
        return (self._connection and self._connection.link.reason) or ""

    async def abandon(self) -> None:
        """Remove everything that the run has on the host after a failed join, if the host can be reached."""
        limits: dict[str, Any] = {"who": f"host at {self.worker}", "timeout_s": CLOSE_TIMEOUT_S}
        try:
            with contextlib.suppress(ActorDiedError):
                if self.lost:
                    await call(self._supervisor.detach, self.key, **limits)
                elif self._agent is not None:
                    await call(self._agent.clean_up, **limits)
                    await call(self._supervisor.terminate, (self.key,), **limits)
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _environment(host: Host, made: RunOnHost) -> dict[str, str]:
    variables = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    if python_path := os.environ.get("PYTHONPATH"):
        variables["PYTHONPATH"] = host.search_path(python_path)
    if made.interface is not None:  # otherwise Gloo uses the address of the hostname, which may be loopback
        variables |= {"GLOO_SOCKET_IFNAME": made.interface, "NCCL_SOCKET_IFNAME": made.interface}
    return {**variables, "TMPDIR": str(made.scratch)}


def _settings_in(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run_dir.glob("*.toml")}
