"""Hosts that come to a run and leave it, with the processes that they bring and take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_rl.cluster.generator_processes import GeneratorProcesses
from titan_rl.cluster.hosts.host import Host, id_of
from titan_rl.cluster.hosts.hosts import Hosts
from titan_rl.cluster.hosts.lifecycle import HostState
from titan_rl.cluster.liveness.host_monitor import RemoteWatcher
from titan_rl.core.calls.user_code import reason
from titan_rl.core.calls.watchdog import logged
from titan_rl.core.errors import ConfigError
from titan_rl.generation.router.router import GeneratorRouter

logger = logging.getLogger(__name__)


class HostedProcesses(Protocol):
    """The processes of a run, by the hosts that they are on."""

    @property
    def hosts(self) -> Hosts: ...

    def names_by_host(self) -> Mapping[str, Sequence[str]]: ...

    async def join(self, host: str) -> Sequence[str]:
        """Start what a host is to have that has joined. Returns the names of what runs there then."""
        ...

    async def leave(self, host: str, why: str) -> None:
        """End what a host has, once it has finished what it is at."""
        ...

    def host_lost(self, host: Host, reason: str) -> None:
        """A host is gone, with all that it had."""
        ...


@dataclass(frozen=True, slots=True)
class RoutedProcesses:
    """Generators and what there is beside them, with the router of the requests that they answer."""

    processes: GeneratorProcesses
    router: GeneratorRouter

    @property
    def hosts(self) -> Hosts:
        return self.processes.hosts

    def names_by_host(self) -> Mapping[str, Sequence[str]]:
        return self.processes.names_by_host()

    async def join(self, host: str) -> Sequence[str]:
        return await self.processes.join(host, self.router)

    async def leave(self, host: str, why: str) -> None:
        await self.processes.leave(host, self.router, why)

    def host_lost(self, host: Host, reason: str) -> None:
        self.processes.host_lost(host, reason)


class ElasticHosts:
    """The hosts of a run while it goes on. A host that joins gets what the run has for one; one that is silent is gone,
    and may join again.

    Args:
        tell: shows a person which hosts come and go.
        all_leave: called where each host that is left says by itself that it is about to go, and none is to be moved
            to. None has the run wait for others.
    """

    def __init__(
        self,
        processes: HostedProcesses,
        tell: Callable[[str], object],
        all_leave: Callable[[], object] | None = None,
    ) -> None:
        self._processes = processes
        self._hosts = hosts = processes.hosts
        self._all_leave = all_leave
        self._tell = logged(tell, logger)
        self._joining: set[str] = set()  # addresses
        self._starting: set[str] = set()  # names of hosts that have joined, and whose processes are not up yet
        self._draining: dict[str, str] = {}  # name -> why
        self._gone: dict[str, HostState] = {}  # by name; those that left, too
        self._let_go: dict[str, str] = {}  # which worker each drained host had, by address
        for host, why in hosts.lost.values():  # while the run's processes started
            self._note_lost(host, why)
        self._drains: set[asyncio.Task[None]] = set()
        hosts.on_lost = self._lost
        hosts.on_leaving = self._leaving
        for name, why in hosts.leaving.items():
            self._leaving(hosts[name], why)

    def states(self) -> list[HostState]:
        """Of all hosts that are, come or were there."""
        names = self._processes.names_by_host()
        here = [
            HostState(host.name, host.worker, *self._state_of(host.name), tuple(names.get(host.name, ())))
            for host in self._hosts
        ]
        gone = [state for name, state in self._gone.items() if name not in self._hosts.names]
        joining = [HostState("", address, "joining") for address in sorted(self._joining)]
        named = {host.address for host in (*here, *joining, *gone)}
        early = {worker: why for worker, why in self._hosts.lost_early.items() if worker not in named}
        return [*here, *joining, *gone, *[HostState("", worker, "gone", why) for worker, why in early.items()]]

    def _state_of(self, name: str) -> tuple[str, str]:
        """That of a host that is there, and why it has it."""
        if name in self._draining:
            return "draining", self._draining[name]
        return ("joining", "its processes start") if name in self._starting else ("in the run", "")

    def take_silences(self) -> dict[str, float]:
        """The longest time, in seconds, for which nothing was heard of each host since this was last called."""
        watchers = {host.name: host.watcher for host in self._hosts}
        return {name: one.take_silence() for name, one in watchers.items() if isinstance(one, RemoteWatcher)}

    async def add(self, address: str) -> None:
        """Take in the host of a worker.

        Raises:
            ActorDiedError: no worker answers there, or what starts there does not come up.
            ConfigError: it is in the run already, or differs from this machine in what the run needs.
        """
        if not self._hosts.config.elsewhere:
            raise ConfigError(
                "the run is on this machine alone, where no other reaches it: begin it with hosts.addresses"
            )
        if address in self._joining or any(host.worker == address for host in self._hosts):
            raise ConfigError(f"the host at {address} is in the run already")
        self._joining.add(address)
        try:
            (host,) = await self._hosts.attach([address])
        finally:
            self._joining.discard(address)
        self._gone.pop(host.name, None)
        self._tell(f"host {host.name} at {address} joins, and its processes start")
        self._starting.add(host.name)
        try:
            started = await self._processes.join(host.name)
        finally:
            self._starting.discard(host.name)
        brings = f" with {', '.join(started)}" if started else ", and nothing is started there"
        self._tell(f"host {host.name} at {address} has joined{brings}")

    async def is_new(self, address: str) -> bool:
        """Whether another worker listens there than that of the host that was drained.

        Raises:
            ActorDiedError: none does.
        """
        return await id_of(address) != self._let_go.get(address)

    async def drain(self, name: str, why: str) -> None:
        """Let a host go, once its requests have ended or moved, and the trainer is saved if it is there.

        Raises:
            ConfigError: there is no such host, or none any more.
        """
        if name not in self._hosts.names:
            if (gone := self._gone.get(name)) is not None:
                how = "has left" if gone.state == "left" else "is lost"
                raise ConfigError(f"host {name} {how} already: {gone.reason}")
            raise ConfigError(f"there is no host {name!r}; there are {', '.join(self._hosts.names)}")
        if name in self._draining:
            raise ConfigError(f"host {name} is draining already")
        self._draining[name] = why
        try:
            address = self._hosts[name].worker
            self._let_go[address] = self._hosts[name].worker_id
            await self._processes.leave(name, why)
            if name not in self._hosts.names:  # it was lost meanwhile, and told of
                return
            self._gone[name] = HostState(name, address, "left", why)  # first, else it may be taken in again meanwhile
            await self._hosts.detach(name)
        finally:
            del self._draining[name]
        self._tell(f"host {name} is drained: {why}")

    def close(self) -> None:
        """The run ends: what hosts have that are about to go is moved no more."""
        for task in self._drains:
            task.cancel()

    def _lost(self, host: Host, why: str) -> None:
        self._tell(f"host {host.name} is lost: {why}")
        self._note_lost(host, why)
        self._processes.host_lost(host, why)

    def _note_lost(self, host: Host, why: str) -> None:
        self._gone[host.name] = HostState(host.name, host.worker, "gone", why)

    def _leaving(self, host: Host, why: str) -> None:
        if self._all_leave is not None and self._hosts.leaving.keys() >= {*self._hosts.names}:
            self.close()
            self._tell(f"each host of the run is told to end ({why}), and so the run ends")
            self._all_leave()
            return
        task = asyncio.ensure_future(self._drain(host.name, why))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _drain(self, name: str, why: str) -> None:
        try:
            await self.drain(name, why)
        except Exception as error:  # of whatever kind: nobody else hears of it
            self._tell(f"host {name} says that it is about to go ({why}), and cannot be drained: {reason(error)}")
