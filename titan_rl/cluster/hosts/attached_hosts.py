"""Registry of the hosts of a run: attaches them together, collects their output, and detaches them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from monarch.actor import this_proc

from titan_rl.cluster.hosts.agent import HostAgent, Piece
from titan_rl.cluster.hosts.cores import usable_cores
from titan_rl.cluster.hosts.folders import RunToken
from titan_rl.cluster.hosts.host import CLOSE_TIMEOUT_S, Host, JoiningHost, all_of, free_names
from titan_rl.cluster.hosts.lifecycle import HostLifecycles, HostState
from titan_rl.cluster.hosts.placement import visible_gpus
from titan_rl.cluster.hosts.preflight import FactsRequest, HostFacts, HostNeeds, check_hosts, collect_facts
from titan_rl.cluster.liveness.health_check import LocalHealthChecks
from titan_rl.cluster.liveness.heartbeat import HostMonitor, RemoteWatcher
from titan_rl.cluster.processes.actor_calls import ActorHandle
from titan_rl.cluster.processes.process import LOOPBACK
from titan_rl.cluster.processes.remote_process import call
from titan_rl.cluster.processes.roles import ProcessId, Role
from titan_rl.config.hosts import HostsConfig, own_address
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import summary
from titan_rl.core.console import LOG, Console
from titan_rl.core.errors import ActorDiedError

INTERVAL_S = 0.5
TIMEOUT_S = 10.0  # longest wait for an answer
REST_S = 60.0
"""Time limit in seconds for the rest of the output at the end. Without it a slow link, or a process that keeps writing,
could take forever."""


class HostOutput:
    """Copies the growing logs and traces of a host into the run's folder. A failure on the host, or of the disk here,
    loses only this output.

    Args:
        run_dir: Folder of the run on this machine.
        console: Shows the reason once if output cannot be read there or written here.
    """

    def __init__(self, host: Host, run_dir: Path, console: Console) -> None:
        self._host = host
        self._run_dir = run_dir
        self._console = console
        self._received: dict[str, tuple[int, int]] = {}  # inode and number of bytes of each file that has arrived
        self._begins: dict[str, int] = {}  # offset in each local file after earlier output of the same name
        self._failed = False
        self._collecting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Collect in the background until `stop`."""
        self._collecting = asyncio.ensure_future(self.collect())

    def stop(self) -> None:
        if self._collecting is not None:
            self._collecting.cancel()

    async def collect(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            with contextlib.suppress(ActorDiedError):  # the host may answer later; a lost host is detached
                await self._take()

    async def take_rest(self) -> None:
        """Copy the rest of the output. Does nothing if the host is lost."""
        with contextlib.suppress(ActorDiedError, TimeoutError):
            async with asyncio.timeout(REST_S):
                while await self._take():
                    pass

    async def _take(self) -> bool:
        """Copy new output once. Returns whether there was any."""
        try:
            pieces: list[Piece] = await self._host.link.call(
                self._host.agent.new_output, self._received, timeout_s=TIMEOUT_S
            )
            for piece in pieces:
                self._append(piece)
        except OSError as error:
            if not self._failed:
                self._console.warning(f"the output of host {self._host.name} cannot be written at the moment: {error}")
            self._failed = True
            return False
        return bool(pieces)

    def _append(self, piece: Piece) -> None:
        """Append a piece completely or not at all. A piece that begins a new file replaces the content of the former
        one."""
        path = self._run_dir / piece.name
        path.parent.mkdir(exist_ok=True)
        with path.open("ab", buffering=0) as file:
            begin = self._begins.setdefault(piece.name, file.tell())
            if not piece.begin:
                file.truncate(begin)
            size = file.seek(0, os.SEEK_END)
            try:
                rest = memoryview(piece.data)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise
        self._received[piece.name] = piece.file, piece.begin + len(piece.data)


logger = logging.getLogger(__name__)


class Hosts:
    """Hosts of a run, with their handles and lifecycles. Made by `open_hosts`. Processes refer to hosts by these names.

    Attributes:
        lifecycles: States of all hosts that the run has, has had, or tries to have.
        config: Settings of the table [hosts].

    Args:
        monitor: Watches the hosts that are attached.
    """

    def __init__(
        self,
        supervisor: Any,
        config: HostsConfig,
        needs: HostNeeds,
        console: Console = LOG,
        monitor: HostMonitor | None = None,
    ) -> None:
        self.supervisor = supervisor
        self.lifecycles = HostLifecycles()
        self.config = config
        self._monitor = monitor
        self._needs = needs
        self.console = console
        self._token = RunToken(needs.run_dir)
        self._expected: HostFacts
        self._outputs: dict[str, HostOutput] = {}
        self._detaching: set[asyncio.Task[None]] = set()
        self._numbers = count()

    def __getitem__(self, name: str) -> Host:
        """Return the handle of a host by its name.

        Raises:
            ActorDiedError: No host of this name is part of the run.
        """
        record = self.lifecycles.named(name)
        if record is None or not record.is_present or record.host is None:
            raise ActorDiedError(f"host {name} is gone")
        return record.host

    def __iter__(self) -> Iterator[Host]:
        return iter([record.host for record in self.lifecycles.present if record.host is not None])

    @property
    def names(self) -> list[str]:
        return [record.name for record in self.lifecycles.present]

    def takes(self, name: str) -> bool:
        """Whether processes may start on a host: it is part of the run, and is not being drained."""
        record = self.lifecycles.named(name)
        return record is not None and record.state in (HostState.STARTING, HostState.UP)

    @property
    def gpus(self) -> dict[str, tuple[str, ...]]:
        return {host.name: host.gpus for host in self}

    @property
    def num_cores(self) -> int:
        """Number of processor cores that the run may use on its hosts, including the controller's machine."""
        own = 0 if socket.gethostname() in self.names else usable_cores()
        return own + sum(host.num_cores for host in self)

    async def attach(self, workers: Sequence[str], *, begins: bool = False) -> list[Host]:
        """Have the hosts of workers join the run. They must match this machine in everything that a run needs.

        Args:
            begins: Whether the run starts with these hosts. Hosts that are lost meanwhile are then left out if the
                others are enough.

        Raises:
            ActorDiedError: A worker did not answer, or a host that the run needs was lost.
            ConfigError: Hosts differ from this machine; the message lists all differences.
        """
        silence_s = self.config.silence_s
        agents = [ProcessId(Role.HOST_AGENT, next(self._numbers)) for _ in workers]
        joining = [
            JoiningHost(self.supervisor, str(agent), self.lifecycles.join(worker), silence_s)
            for agent, worker in zip(agents, workers, strict=True)
        ]
        try:
            return await self._attach_all(joining, begins)
        finally:
            left = [host_joining for host_joining in joining if not host_joining.record.is_present]
            for host_joining in left:
                self.lifecycles.join_failed(host_joining.record, host_joining.lost if host_joining.has_answered else "")
            await asyncio.gather(*[host_joining.abandon() for host_joining in left])

    async def _attach_all(self, joining: Sequence[JoiningHost], begins: bool) -> list[Host]:
        question = self._question()
        with self._token.shown():
            self._expected = await in_thread(collect_facts, question)
            inspected = await self._on_each(joining, lambda host_joining: host_joining.look(question), begins)
        taken = [record.name for record in self.lifecycles if self.lifecycles.named(record.name) is record]
        names = free_names([host_joining.facts.hostname for host_joining in inspected], taken)
        for host_joining, name in zip(inspected, names, strict=True):
            host_joining.become(name)
        roles = self._needs.roles(self.config, [*self.names, *names], begins=begins)
        found = {host_joining.host.name: host_joining.facts for host_joining in inspected}
        check_hosts(self._expected, found, self._needs, roles, sync=self.config.sync)
        for host_joining in inspected:
            self._compare_clocks(host_joining)
        state = HostState.UP if begins else HostState.STARTING
        prepared = await self._on_each(joining, lambda host_joining: self._prepare(host_joining, state), begins)
        for host_joining in joining:
            if why := host_joining.left_out:
                self.notify(f"the run starts without the host at {host_joining.worker}: {why}; it may join later")
        return [host_joining.host for host_joining in prepared]

    async def _on_each(
        self, joining: Sequence[JoiningHost], step: Callable[[JoiningHost], Awaitable[None]], begins: bool
    ) -> list[JoiningHost]:
        """Take a step with each host that is not left out. Returns the hosts that are not left out afterwards.

        Raises:
            ActorDiedError: The step failed, or the run needs hosts that were lost. All problems are listed, so that one
                start reports every problem.
        """
        problems = await all_of([self._try(step, each, begins) for each in joining if not each.left_out])
        if any(problems):
            raise ActorDiedError("; ".join(filter(None, problems)))
        for each in joining:
            if each.lost and not each.left_out:
                each.left_out = f"host at {each.worker} is gone: {each.lost}"
        left_out = [each.left_out for each in joining if each.left_out]
        lacks = [*self.config.too_few_of(len(joining) - len(left_out))] if begins else []
        if begins and self._needs.trains and all(each.left_out for each in joining[: self.config.train]):
            lacks.append("all training hosts are lost")
        if left_out and (lacks or not begins):
            raise ActorDiedError("; ".join([*left_out, *lacks]))
        return [each for each in joining if not each.left_out]

    async def _try(
        self, step: Callable[[JoiningHost], Awaitable[None]], host_joining: JoiningHost, begins: bool
    ) -> str:
        """Take a step with a host. If the host is lost while the run starts, it is left out. Returns any other problem,
        otherwise ""."""
        try:
            await step(host_joining)
        except ActorDiedError as error:
            if not begins or not await host_joining.is_lost():
                return str(error)
            host_joining.left_out = str(error)
        except OSError as error:
            raise ActorDiedError(f"host at {host_joining.worker}: {summary(error)}") from error
        return ""

    def _compare_clocks(self, host_joining: JoiningHost) -> None:
        name, clocks = host_joining.host.name, host_joining.clocks
        logger.info("the clock of host %s is %s", name, clocks)
        if clocks.matters:
            self.notify(
                f"the clock of host {name} is {clocks}: timestamps in its logs are off by this, and nothing else; "
                "synchronize it with NTP"
            )

    async def detach(self, name: str, why: str = "the run continues without it") -> None:
        """Collect the rest of a host's output, free the run's resources on the host, and continue without it."""
        output, host = self._outputs.get(name), self[name]
        self._release(host, HostState.LEFT, why)
        if output is not None:
            await output.take_rest()
        if isinstance(host.watcher, RemoteWatcher):
            with contextlib.suppress(ActorDiedError):
                await host.link.call(host.agent.clean_up, timeout_s=CLOSE_TIMEOUT_S)
            host.watcher.dismiss()
            with contextlib.suppress(ActorDiedError):
                await host.link.call(self.supervisor.terminate, (host.key,), timeout_s=CLOSE_TIMEOUT_S)

    def _release(self, host: Host, state: HostState, reason: str) -> None:
        if (output := self._outputs.pop(host.name, None)) is not None:
            output.stop()
        if (record := self.lifecycles.named(host.name)) is not None:
            self.lifecycles.move(record, state, reason)

    def host_leaving(self, name: str, reason: str) -> None:
        """Handle a host's announcement that it is about to shut down. Called by the monitor."""
        if (record := self.lifecycles.named(name)) is not None:
            self.lifecycles.announce_leaving(record, reason)

    def notify(self, text: str) -> None:
        """Log a warning, and show it to the user."""
        logger.warning("%s", text)
        self.console.warning(text)

    def host_lost(self, name: str, reason: str) -> None:
        """Handle a host that does not respond. If it was joining, the join fails. Called by the monitor."""
        record = self.lifecycles.named(name)
        if record is None or record.host is None:
            return
        host = record.host
        host.link.end(reason)
        task = asyncio.ensure_future(self._detach_lost(host))
        self._detaching.add(task)
        task.add_done_callback(self._detaching.discard)
        if record.is_present:
            self._release(host, HostState.LOST, reason)

    async def _detach_lost(self, host: Host) -> None:
        """Detach a host from the supervisor, so that nothing waits for its processes to stop."""
        with contextlib.suppress(ActorDiedError):
            await call(self.supervisor.detach, host.key, who="supervisor", timeout_s=CLOSE_TIMEOUT_S)

    async def close(self) -> None:
        """Detach all hosts other than this machine."""
        await all_of([self._leave(host) for host in self if not host.is_here])
        await asyncio.gather(*self._detaching)

    async def _leave(self, host: Host) -> None:
        if host.name in self.names:  # else it was lost meanwhile
            await self.detach(host.name, "the run ends")

    def _question(self) -> FactsRequest:
        needs = self._needs
        folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        return FactsRequest(needs.run_dir, self._token.text, needs.model, needs.modules, tuple(folders))

    async def _prepare(self, host_joining: JoiningHost, state: HostState) -> None:
        run_dir, host = self._needs.run_dir, host_joining.host
        await host_joining.prepare(run_dir)
        if self._monitor is not None:
            await host_joining.watch(self._monitor.expect(host.name, self))
        if self.config.sync:
            await host_joining.copy_missing_files(self._question(), self._expected, self.console)
        self.lifecycles.joined(host_joining.record, state)
        if host_joining.lost:
            self.host_lost(host.name, host_joining.lost)
            raise ActorDiedError(f"host {host.name} was lost while it joined: {host_joining.lost}")
        output = self._outputs[host.name] = HostOutput(host, run_dir, self.console)
        output.start()


@contextlib.asynccontextmanager
async def open_hosts(
    config: HostsConfig, supervisor: Any, needs: HostNeeds, console: Console = LOG
) -> AsyncGenerator[Hosts]:
    """Context manager: open the hosts that the settings name, by default this machine. Everything that the run has on
    them is removed at the end of the block.

    Raises:
        ActorDiedError: A worker did not answer.
        ConfigError: A host differs from this machine.
    """
    async with contextlib.AsyncExitStack() as opened:
        if not config.elsewhere:
            hosts = Hosts(supervisor, config, needs, console)
            agent = ActorHandle(this_proc().spawn("host_agent", HostAgent))
            checks = opened.enter_context(LocalHealthChecks())
            resources = visible_gpus(), usable_cores()
            host = Host(socket.gethostname(), LOOPBACK, agent, *resources, watcher=checks, ping_socket=checks.path)
            hosts.lifecycles.add(host)
        else:
            address = own_address(config)
            monitor = HostMonitor(address, silence_s=config.silence_s, lease_s=config.lease_s)
            hosts = Hosts(supervisor, config, needs, console, opened.enter_context(monitor))
            opened.push_async_callback(hosts.close)
            await hosts.attach(config.addresses, begins=True)
        yield hosts
