"""The hosts of a run, as its controller sees them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from monarch.actor import this_proc

from titan_rl.actors.hosts.agent import HostAgent, RunOnHost
from titan_rl.actors.hosts.facts import HostFacts, Question, look
from titan_rl.actors.hosts.host import Host
from titan_rl.actors.hosts.meeting import all_of, free_names, reach, resolve
from titan_rl.actors.hosts.output import HostOutput
from titan_rl.actors.hosts.preflight import HostNeeds, check_hosts
from titan_rl.actors.hosts.scratch import ENVIRONMENT
from titan_rl.actors.hosts.sync import chunks_of, code_files, model_files
from titan_rl.actors.liveness.host_monitor import HostMonitor, RemoteWatcher
from titan_rl.actors.liveness.local_lookout import LocalLookout
from titan_rl.actors.processes.gpus import visible_gpus
from titan_rl.actors.processes.process import LOOPBACK
from titan_rl.actors.processes.remote_process import call
from titan_rl.calls.threads import in_thread
from titan_rl.config.hosts import HostsConfig, join_address, own_address, split_address
from titan_rl.errors import ActorDiedError, TitanRLError

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0
TOKEN = ".hosts"  # a file of the run's folder, by which a host tells that it sees it


class Hosts:
    """Made by `open_hosts`. Processes go by the names of these hosts.

    Attributes:
        on_lost: called with a host that is silent, and the reason, once it is no more among these.
        on_leaving: called with a host that says that it is about to go, and its reason.
        config: the table [hosts].

    Args:
        monitor: hears of the hosts that are attached.
    """

    def __init__(
        self,
        supervisor: Any,
        config: HostsConfig,
        needs: HostNeeds,
        tell: Callable[[str], object] = logger.info,
        monitor: HostMonitor | None = None,
    ) -> None:
        self.supervisor = supervisor
        self.on_lost: Callable[[Host, str], object] = lambda host, reason: None
        self.on_leaving: Callable[[Host, str], object] = lambda host, reason: None
        self.config = config
        self._monitor = monitor
        self._needs = needs
        self._tell = tell
        self._hosts: dict[str, Host] = {}
        self._token = secrets.token_hex(8)
        self._expected: HostFacts
        self._outputs: dict[str, HostOutput] = {}
        self._collecting: dict[str, asyncio.Task[None]] = {}
        self._giving_up: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self._agents: dict[str, Any] = {}  # of hosts that are being attached, by key

    def __getitem__(self, name: str) -> Host:
        """
        Raises:
            ActorDiedError: there is no such host any more.
        """
        if name not in self._hosts:
            raise ActorDiedError(f"host {name} is gone")
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(list(self._hosts.values()))

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def names(self) -> list[str]:
        return list(self._hosts)

    @property
    def gpus(self) -> dict[str, tuple[str, ...]]:
        return {host.name: host.gpus for host in self}

    def add(self, host: Host) -> None:
        """Take in a host that needs no preparing."""
        self._hosts[host.name] = host

    async def attach(self, workers: Sequence[str]) -> list[Host]:
        """Take in hosts, which are as this machine in what a run needs.

        Raises:
            ActorDiedError: a worker did not answer.
            ConfigError: a host differs; all that do are named.
        """
        keys = [f"agent-{next(self._numbers)}" for _ in workers]
        try:
            return await self._attach(keys, workers)
        except (TitanRLError, asyncio.CancelledError):
            await self._give_back({*keys} - {host.key for host in self})
            raise
        finally:
            for key in keys:
                self._agents.pop(key, None)

    async def _give_back(self, keys: set[str]) -> None:
        """What agents that are not used have on their hosts."""
        limits: dict[str, Any] = {"who": "a host that is not taken in", "timeout_s": CLOSE_TIMEOUT_S}
        agents = [self._agents[key] for key in keys if key in self._agents]
        await asyncio.gather(*[call(agent.clean_up, **limits) for agent in agents], return_exceptions=True)
        with contextlib.suppress(ActorDiedError):
            await call(self.supervisor.terminate, tuple(keys), **limits)

    async def _attach(self, keys: Sequence[str], workers: Sequence[str]) -> list[Host]:
        token = self._needs.run_dir / TOKEN
        token.write_text(self._token)
        try:
            question = self._question()
            self._expected = await in_thread(look, question)
            met = await all_of([self._meet(*each, question) for each in zip(keys, workers, strict=True)])
        finally:
            token.unlink(missing_ok=True)
        names = free_names([facts.hostname for *_, facts in met], self.names)
        named = [(name, *answer) for name, answer in zip(names, met, strict=True)]
        roles = self._needs.roles(self.config, [*self.names, *names])
        found = {name: facts for name, *_, facts in named}
        check_hosts(self._expected, found, self._needs, roles, sync=self.config.sync)
        prepared = await all_of([self._prepare(*each) for each in named])
        for host in prepared:  # their order says who trains, whichever was ready first
            if host.name in self._hosts:
                self._hosts[host.name] = self._hosts.pop(host.name)
        return prepared

    async def detach(self, name: str) -> None:
        """Give back what the run has on a host, and go on without it."""
        host = self._forget(name)
        if isinstance(host.watcher, RemoteWatcher):
            with contextlib.suppress(ActorDiedError):
                await host.link.call(host.agent.clean_up, timeout_s=CLOSE_TIMEOUT_S)
            host.watcher.dismiss()
            with contextlib.suppress(ActorDiedError):
                await host.link.call(self.supervisor.terminate, (host.key,), timeout_s=CLOSE_TIMEOUT_S)

    def _forget(self, name: str) -> Host:
        if (task := self._collecting.pop(name, None)) is not None:
            task.cancel()
        self._outputs.pop(name, None)
        return self._hosts.pop(name)

    def _lose(self, host: Host, reason: str) -> None:
        host.link.end(reason)
        task = asyncio.ensure_future(self._give_up(host))
        self._giving_up.add(task)
        task.add_done_callback(self._giving_up.discard)
        if self._hosts.get(host.name) is host:
            self.on_lost(self._forget(host.name), reason)

    async def _give_up(self, host: Host) -> None:
        """Have nobody wait until the processes of a host that is gone have stopped."""
        with contextlib.suppress(ActorDiedError):
            await call(self.supervisor.detach, host.key, who="supervisor", timeout_s=CLOSE_TIMEOUT_S)

    async def close(self) -> None:
        """Take what is left of their output, and give back what the run has there."""
        for task in self._collecting.values():
            task.cancel()
        self._collecting.clear()
        await all_of([self._leave(host) for host in self if not host.is_here])
        await asyncio.gather(*self._giving_up)

    async def _leave(self, host: Host) -> None:
        if host.name in self._outputs:
            await self._outputs[host.name].take_rest()
        if host.name in self._hosts:  # else it was lost meanwhile
            await self.detach(host.name)

    def _question(self) -> Question:
        needs = self._needs
        folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        return Question(needs.run_dir, self._token, needs.model, needs.modules, tuple(folders))

    async def _meet(self, key: str, worker: str, question: Question) -> tuple[str, str, str, Any, HostFacts]:
        """The key of the supervisor, the worker, the address, the agent and what it says."""
        host, port = split_address(worker)
        try:
            address = await in_thread(resolve, host)
            await reach(address, port)
            arguments = (key, f"tcp://{join_address(address, port)}")
            await call(self.supervisor.attach, *arguments, who="supervisor", timeout_s=ATTACH_TIMEOUT_S)
            agent = self._agents[key] = await self._spawn_agent(key)
            await call(agent.enter, who=worker, timeout_s=ATTACH_TIMEOUT_S)
            facts = await call(agent.look, question, who=worker, timeout_s=ATTACH_TIMEOUT_S)
        except (ActorDiedError, OSError) as error:
            raise ActorDiedError(
                f"hosts.addresses: no worker at {worker}: {error}; start `titan-rl worker --listen {worker}` there"
            ) from None
        return key, worker, address, agent, facts

    async def _spawn_agent(self, key: str) -> Any:
        arguments = (key, HostAgent, (), 0, key)
        return await call(self.supervisor.spawn, *arguments, who="supervisor", timeout_s=ATTACH_TIMEOUT_S)

    async def _prepare(self, name: str, key: str, worker: str, address: str, agent: Any, facts: HostFacts) -> Host:
        run_dir = self._needs.run_dir
        files = {path.name: path.read_bytes() for path in run_dir.glob("*.toml")}
        made: RunOnHost = await call(
            agent.prepare, run_dir if facts.sees_run else None, files, address, who=name, timeout_s=ATTACH_TIMEOUT_S
        )
        host = Host(name, address, agent, facts.gpus, key, worker=worker)
        if self._monitor is not None:
            await self._watch(host, self._monitor)
        if made.run_dir != run_dir:
            host.folders = {run_dir: made.run_dir}
        if self.config.sync:
            host.folders = {**host.folders, **await self._sync(name, agent, facts)}
        host.environment = self._environment(host, made)
        if host.link.reason is not None:
            raise ActorDiedError(f"host {name} was lost as it joined: {host.link.reason}")
        self._hosts[name] = host
        output = self._outputs[name] = HostOutput(host, run_dir, self._tell)
        self._collecting[name] = asyncio.ensure_future(output.collect())
        return host

    async def _watch(self, host: Host, monitor: HostMonitor) -> None:
        watcher = host.watcher = monitor.expect(
            host.name,
            on_lost=lambda reason: self._lose(host, reason),
            on_leaving=lambda reason: self.on_leaving(host, reason),
        )
        begin = host.agent.begin_watch
        host.pulse = await host.link.call(begin, watcher.settings, timeout_s=ATTACH_TIMEOUT_S)

    async def _sync(self, name: str, agent: Any, facts: HostFacts) -> dict[Path, Path]:
        """Bring the model and the code to a host that lacks them. Returns where each folder is there."""
        question, needs = self._question(), self._needs
        lacking = [] if facts.model == self._expected.model else [(needs.model, model_files(needs.model))]
        if facts.missing.keys() - self._expected.missing.keys():
            folders = [Path(folder) for folder in question.pythonpath]
            lacking += [(folder, await in_thread(code_files, folder)) for folder in folders if folder.is_dir()]
        brought: dict[Path, Path] = {}
        for number, (folder, files) in enumerate(lacking):
            size = sum(path.stat().st_size for path in files)
            self._tell(f"copying {folder}, {size / (1 << 20):.1f} MiB, to {name}")
            chunks = chunks_of(folder, files)
            while (chunk := await in_thread(next, chunks, None)) is not None:
                arguments = (number, *chunk)
                brought[folder] = await call(agent.receive, *arguments, who=name, timeout_s=ATTACH_TIMEOUT_S)
        return brought

    def _environment(self, host: Host, made: RunOnHost) -> dict[str, str]:
        variables = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
        if python_path := os.environ.get("PYTHONPATH"):
            variables["PYTHONPATH"] = host.search_path(python_path)
        if made.interface is not None:  # else Gloo takes the address of the hostname, which may be loopback
            variables |= {"GLOO_SOCKET_IFNAME": made.interface, "NCCL_SOCKET_IFNAME": made.interface}
        return {**variables, "TMPDIR": str(made.scratch)}


@contextlib.asynccontextmanager
async def open_hosts(
    config: HostsConfig, supervisor: Any, needs: HostNeeds, tell: Callable[[str], object] = logger.info
) -> AsyncGenerator[Hosts]:
    """The hosts that settings name, by default this machine. What the run has there goes with the block.

    Raises:
        ActorDiedError: a worker did not answer.
        ConfigError: hosts differ from this machine.
    """
    async with contextlib.AsyncExitStack() as opened:
        if not config.elsewhere:
            hosts = Hosts(supervisor, config, needs, tell)
            agent, lookout = this_proc().spawn("host_agent", HostAgent), opened.enter_context(LocalLookout())
            here = Host(socket.gethostname(), LOOPBACK, agent, visible_gpus(), watcher=lookout, pulse=lookout.path)
            hosts.add(here)
        else:
            address = own_address(config)
            monitor = HostMonitor(address, silence_s=config.silence_s, lease_s=config.lease_s)
            hosts = Hosts(supervisor, config, needs, tell, opened.enter_context(monitor))
            opened.push_async_callback(hosts.close)
            await hosts.attach(config.addresses)
        yield hosts
