"""Elastic hosts of a run: the hosts that it should have, and the joins and drains that lead to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from titan_rl.cluster.hosts.host_files import AddressFile, HostFiles, HostRequest, HostStates
from titan_rl.cluster.hosts.lifecycle import (
    Demand,
    HostHistory,
    HostLifecycles,
    HostListener,
    HostRecord,
    HostState,
    HostStatus,
)
from titan_rl.cluster.liveness.heartbeat import RemoteWatcher
from titan_rl.config.hosts import HostsConfig, join_address, split_address
from titan_rl.core.calls.user_code import reason
from titan_rl.core.errors import ConfigError

if TYPE_CHECKING:
    from titan_rl.cluster.hosts.attached_hosts import Hosts

logger = logging.getLogger(__name__)

LOOK_S = 0.1
RETRY_S = 5.0
ASK_S = 5.0
ANSWER_S = 30.0
MISSES = 3
"""Number of successive answers without a host after which it counts as gone. DNS, for example, omits a name now and
then."""


class HostedProcesses(Protocol):
    """Processes of a run, grouped by host."""

    @property
    def hosts(self) -> Hosts: ...

    def names_by_host(self) -> Mapping[str, Sequence[str]]: ...

    async def join(self, host: str) -> Sequence[str]:
        """Start the processes of a host that has joined. Returns the names of those that run there afterwards."""
        ...

    async def leave(self, host: str, why: str) -> None:
        """End the processes of a host once they have finished their work."""
        ...


class ElasticHosts(HostListener):
    """Joins and drains hosts of a run in progress. A host that does not respond is lost, and may join again.

    Args:
        all_leave: Called if all remaining hosts announce that they are about to shut down, so that work cannot move. If
            it is None, the run waits for other hosts.
    """

    def __init__(
        self,
        processes: HostedProcesses,
        all_leave: Callable[[], object] | None = None,
    ) -> None:
        self._processes = processes
        self._hosts = processes.hosts
        self.lifecycles: HostLifecycles = self._hosts.lifecycles
        self._all_leave = all_leave
        self.notify = self._hosts.notify
        self._drains: set[asyncio.Task[None]] = set()
        self.lifecycles.subscribe(self)
        for record in self.lifecycles.present:
            if record.leaving:
                self.host_leaving(record)

    def statuses(self) -> list[HostStatus]:
        """Status of each host, with the names of its processes."""
        return self.lifecycles.statuses(self._processes.names_by_host())

    def take_silences(self) -> dict[str, float]:
        """Return the longest time in seconds without a heartbeat of each host since the previous call."""
        watchers = {host.name: host.watcher for host in self._hosts}
        return {name: one.take_silence() for name, one in watchers.items() if isinstance(one, RemoteWatcher)}

    async def add(self, address: str) -> None:
        """Have the host of a worker join the run, and start its processes. Returns once they have started.

        Raises:
            ActorDiedError: No worker answers at the address, or the processes do not start.
            ConfigError: The host is already in the run, or differs from this machine in something that the run needs.
        """
        if not self._hosts.config.elsewhere:
            raise ConfigError(
                "the run uses only this machine, which other hosts cannot reach: start it with hosts.addresses"
            )
        record = self.lifecycles.of(address)
        if record.is_present or record.state is HostState.JOINING:
            raise ConfigError(f"the host at {address} is already in the run")
        await self._hosts.attach([address])
        name = record.name
        self.notify(f"host {name} at {address} joins, and its processes start")
        try:
            started = await self._processes.join(name)
        finally:
            if record.state is HostState.STARTING:
                self.lifecycles.move(record, HostState.UP)
        brings = f" with {', '.join(started)}" if started else ", without processes"
        self.notify(f"host {name} at {address} has joined{brings}")

    async def is_new(self, address: str) -> bool:
        """Whether the worker at this address has been restarted since the host was drained.

        Raises:
            ActorDiedError: No worker answers at the address.
        """
        from titan_rl.cluster.hosts.host import worker_id_at

        return await worker_id_at(address) != self.lifecycles.of(address).worker_id

    async def drain(self, name: str, why: str) -> None:
        """Have a host leave the run, once its requests have ended or moved and its trainer, if any, has been saved.

        Raises:
            ConfigError: No host of this name is in the run, or it is already draining.
        """
        record = self.lifecycles.named(name)
        if record is None or not record.is_present:
            if (ended := self.lifecycles.ended(name)) is not None:
                how = "has left" if ended.state is HostState.LEFT else "is lost"
                raise ConfigError(f"host {name} {how} already: {ended.reason}")
            raise ConfigError(f"there is no host {name!r}; there are {', '.join(self._hosts.names)}")
        if record.state is HostState.DRAINING:
            raise ConfigError(f"host {name} is already draining")
        record.worker_id = self._hosts[name].worker_id
        self.lifecycles.move(record, HostState.DRAINING, why)
        try:
            await self._processes.leave(name, why)
            if record.state is not HostState.DRAINING:  # the host was lost meanwhile, which has been reported
                return
            await self._hosts.detach(name, why)
        finally:
            if record.state is HostState.DRAINING:
                self.lifecycles.move(record, HostState.UP)
        self.notify(f"host {name} is drained: {why}")

    def close(self) -> None:
        """Cancel the drains of hosts that are about to shut down, because the run ends."""
        for task in self._drains:
            task.cancel()

    def host_changed(self, record: HostRecord, before: HostState) -> None:
        if record.state is HostState.LOST and before is not HostState.JOINING:
            self.notify(f"host {record.name} is lost: {record.reason}")

    def host_leaving(self, record: HostRecord) -> None:
        if self._all_leave is not None and all(one.leaving for one in self.lifecycles.present):
            self.close()
            self.notify(f"all hosts of the run were asked to leave ({record.leaving}), so the run ends")
            self._all_leave()
            return
        task = asyncio.ensure_future(self._drain(record.name, record.leaving))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _drain(self, name: str, why: str) -> None:
        try:
            await self.drain(name, why)
        except Exception as error:  # nobody awaits this task
            self.notify(f"host {name} is about to shut down ({why}), and cannot be drained: {reason(error)}")


class ProvidedHosts:
    """Current hosts of a provider, which is polled every `ASK_S` seconds.

    Args:
        addresses: Addresses of the hosts that the run starts with.
        current: Returns the current addresses; see `ChangingWorkers.current`.
        all_leave: Called if all hosts are about to shut down; see `ElasticHosts`.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        current: Callable[[], Awaitable[Collection[str]]],
        all_leave: Callable[[], object] | None = None,
    ) -> None:
        self.all_leave = all_leave
        self._addresses = frozenset(addresses)
        self._current = current
        self._missed = Counter[str]()  # by address: number of successive answers without it

    def read(self) -> frozenset[str]:
        """Addresses of the current hosts according to the latest answers."""
        return self._addresses

    async def watch(self) -> None:
        """Poll the provider until cancelled. An answer that fails or is late changes nothing."""
        while True:
            await asyncio.sleep(ASK_S)
            try:
                async with asyncio.timeout(ANSWER_S):
                    self._note({_full(address) for address in await self._current()})
            except Exception as error:
                logger.warning("the provider's list of hosts cannot be read: %s", reason(error))

    def _note(self, now: Collection[str]) -> None:
        self._missed = Counter({address: self._missed[address] + 1 for address in self._addresses.difference(now)})
        self._addresses = frozenset(now) | {address for address, missed in self._missed.items() if missed < MISSES}


@dataclass(slots=True)
class _List:
    """Changing list of wanted addresses.

    Args:
        why: Reason for draining a host whose address is no longer listed.
        known: Content at the previous look.
    """

    source: AddressFile | ProvidedHosts
    why: str
    known: frozenset[str] = frozenset()


class HostReconciler:
    """Starts the joins and drains that make the hosts of a run match the wanted ones.

    The wanted hosts come from the settings, a file of addresses, a provider and `titan-rl hosts`. A lost host is tried
    again until it answers. A drained host joins again once it is listed again, or once its worker has been restarted. A
    host that is no longer listed is drained.

    Args:
        addresses: Addresses in the settings.
        addresses_file: File of addresses, polled for changes.
        history: Updated at each look.
        provided: Hosts of a provider that come and go.
    """

    def __init__(
        self,
        hosts: ElasticHosts,
        files: HostFiles,
        addresses: Iterable[str],
        addresses_file: Path | None,
        history: HostHistory | None = None,
        provided: ProvidedHosts | None = None,
    ) -> None:
        self._hosts = hosts
        self._lifecycles = hosts.lifecycles
        self._history = history or HostHistory()
        self._files = files
        self._lists: list[_List] = []
        if addresses_file is not None:
            self._lists.append(_List(AddressFile(addresses_file), "its address is no longer in the file of addresses"))
        if provided is not None:
            self._lists.append(_List(provided, "its provider no longer lists it"))
        self._notify = hosts.notify
        self._answers: dict[str, str] = {}
        self._written: HostStates | None = None
        self._cannot_write = False
        self._tasks: set[asyncio.Task[None]] = set()
        for address in addresses:
            self._lifecycles.of(_full(address)).demand = Demand.WANTED

    async def watch(self) -> None:
        """Look every `LOOK_S` seconds until cancelled."""
        try:
            while True:
                self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks:
                task.cancel()
            self._write()  # changes since the previous look, and since the last metrics
            self._history.close()

    def look(self) -> None:
        """Start the joins and drains that are due, and write the states to `hosts.json`."""
        for request in self._files.new_requests():
            self._begin(self._answer(request))
        for each in self._lists:
            self._follow(each)
        now = asyncio.get_running_loop().time()
        for record in self._lifecycles:
            if record.state is HostState.UP and record.demand is Demand.UNLISTED:
                self._begin(self._drain(record.name, record.drain_reason))
            is_absent = record.state in (HostState.WANTED, HostState.LEFT, HostState.LOST)
            is_wanted = record.demand in (Demand.WANTED, Demand.AFTER_RESTART)
            if is_absent and is_wanted and now - record.tried_at >= RETRY_S:
                record.tried_at = now
                self._begin(self._try(record) if record.demand is Demand.WANTED else self._try_new_worker(record))
        self._write()

    def _follow(self, listing: _List) -> None:
        before, listing.known = listing.known, frozenset(_full(address) for address in listing.source.read())
        for address in listing.known - before:
            self._lifecycles.of(address).demand = Demand.WANTED
        for address in before.difference(*[each.known for each in self._lists]):
            record = self._lifecycles.of(address)
            record.demand, record.drain_reason = Demand.UNLISTED, listing.why

    async def _answer(self, request: HostRequest) -> None:
        try:
            if request.do == "add":
                record = self._lifecycles.of(_full(request.what))
                record.tried_at = asyncio.get_running_loop().time()
                await self._hosts.add(record.address)
                record.demand = Demand.WANTED
            else:
                await self._hosts.drain(request.what, "titan-rl hosts asked for it")
        except Exception as error:  # of any kind, because the requester waits for the answer
            self._answers[request.id] = reason(error)
        else:
            self._answers[request.id] = ""
        self._write()

    async def _try_new_worker(self, record: HostRecord) -> None:
        """Have a drained host join if its worker has been restarted. Failures are not shown, because nobody waits for
        this."""
        with contextlib.suppress(Exception):
            if await self._hosts.is_new(record.address):
                await self._try(record)

    async def _try(self, record: HostRecord) -> None:
        try:
            await self._hosts.add(record.address)
        except Exception as error:  # including errors of that machine, whose disk may be full
            if record.complaint != (why := reason(error)):
                record.complaint = why
                self._notify(f"the host at {record.address} cannot join: {why}")
        else:
            record.complaint = ""

    async def _drain(self, name: str, why: str) -> None:
        try:
            await self._hosts.drain(name, why)
        except Exception as error:
            self._notify(f"host {name} cannot be drained: {reason(error)}")

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _write(self) -> None:
        hosts = self._hosts.statuses()
        self._history.note(hosts, self._hosts.take_silences())
        history = self._history
        states = HostStates(hosts, dict(self._answers), list(history.events), dict(history.counts))
        if states == self._written:
            return
        try:
            self._files.write(states)
        except OSError as error:
            if not self._cannot_write:
                self._notify(f"the list of hosts cannot be written at the moment, and the run continues: {error}")
            self._cannot_write = True
        else:
            self._written, self._cannot_write = states, False


def hosts_watcher(
    config: HostsConfig,
    files: HostFiles,
    processes: HostedProcesses,
    history: HostHistory | None = None,
    provided: ProvidedHosts | None = None,
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Make a background task that reconciles the hosts of a run with the wanted ones until it is cancelled.

    Args:
        files: Files with requests from `titan-rl hosts` and the run's answers.
        history: Updated with the states of hosts.
        provided: Hosts of a provider that come and go.
    """
    elastic = ElasticHosts(processes, provided and provided.all_leave)
    file = Path(config.addresses_file) if config.addresses_file else None
    reconciler = HostReconciler(elastic, files, config.addresses, file, history, provided)

    async def watch() -> None:
        with contextlib.closing(elastic):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(reconciler.watch())
                if provided is not None:
                    tasks.create_task(provided.watch())

    return watch


def _full(address: str) -> str:
    return join_address(*split_address(address))
