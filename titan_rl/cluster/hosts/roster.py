"""Which hosts a run is to have, and what is done until it has them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titan_rl.cluster.hosts.lifecycle import HostHistory, HostState
from titan_rl.cluster.hosts.provided import ProvidedHosts
from titan_rl.cluster.hosts.requests import AddressFile, HostFiles, HostRequest, HostStates
from titan_rl.config.hosts import join_address, split_address
from titan_rl.core.calls.user_code import reason
from titan_rl.core.calls.watchdog import logged

logger = logging.getLogger(__name__)

LOOK_S = 0.1
RETRY_S = 5.0


class JoinableHosts(Protocol):
    """The hosts of a run, as far as they come and go."""

    def states(self) -> Sequence[HostState]: ...

    def take_silences(self) -> dict[str, float]:
        """The longest time, in seconds, for which nothing was heard of each since this was last called."""
        ...

    async def add(self, address: str) -> None:
        """Take in the host of a worker.

        Raises:
            TitanRLError: it is not there, or cannot be used.
        """
        ...

    async def is_new(self, address: str) -> bool:
        """Whether another worker listens there than that of the host that was drained.

        Raises:
            TitanRLError: none does.
        """
        ...

    async def drain(self, name: str, why: str) -> None:
        """Let a host go, once what it has is done or moved.

        Raises:
            TitanRLError: there is no such host.
        """
        ...


@dataclass(slots=True)
class _List:
    """Addresses that are wanted as long as they are in it.

    Args:
        why: a host is drained whose address is there no more.
        known: what it said last.
    """

    read: Callable[[], frozenset[str]]
    why: str
    known: frozenset[str] = frozenset()


class Roster:
    """Takes in whoever is asked for, by settings, a file of addresses, a provider or `titan-rl hosts`, and whoever was
    lost once it answers again; has those drained that are asked for no more. One that was drained comes back when it is
    asked for anew, or once another worker listens at its address.

    Args:
        addresses: that settings name.
        addresses_file: one that is read again and again.
        tell: shows a person a line.
        history: is told how the hosts stand.
        provided: those of a provider whose hosts come and go.
    """

    def __init__(
        self,
        hosts: JoinableHosts,
        files: HostFiles,
        addresses: Iterable[str],
        addresses_file: Path | None,
        tell: Callable[[str], object],
        history: HostHistory | None = None,
        provided: ProvidedHosts | None = None,
    ) -> None:
        self._hosts = hosts
        self._history = history or HostHistory()
        self._files = files
        self._wanted = {_full(address) for address in addresses}
        self._anew: set[str] = set()  # addresses that are on a list since not long, where one that left is wanted again
        self._left: set[str] = set()  # addresses of hosts that were drained, or are to be
        self._lists: list[_List] = []
        if addresses_file is not None:
            read = AddressFile(addresses_file).read
            self._lists.append(_List(read, "its address is no longer in the file of addresses"))
        if provided is not None:
            self._lists.append(_List(provided.read, "its provider has it no more"))
        self._tell = logged(tell, logger)
        self._tried_at: dict[str, float] = {}
        self._told: dict[str, str] = {}  # why a host could not be taken in, by address
        self._answers: dict[str, str] = {}
        self._unwanted: dict[str, str] = {}  # why, by the addresses of hosts that are drained, once they have joined
        self._written: HostStates | None = None
        self._cannot_write = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def watch(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks:
                task.cancel()
            self._write()  # what became of hosts since the last look, and since the last metrics
            self._history.close()

    def look(self) -> None:
        """Begin what is to be done now, and write down how it stands."""
        for request in self._files.new_requests():
            self._begin(self._answer(request))
        for each in self._lists:
            self._follow(each)
        now = asyncio.get_running_loop().time()
        states = self._hosts.states()
        for host in states:
            if host.state == "in the run" and (why := self._unwanted.pop(host.address, None)) is not None:
                self._begin(self._drain(host.name, why))
        self._anew -= {host.address for host in states if host.state == "in the run"}
        self._left |= {host.address for host in states if host.state == "left"}
        self._left -= {host.address for host in states if host.state == "in the run"} | self._anew
        here = {host.address for host in states if host.state not in ("gone", "left")}
        for address in self._wanted - here:
            if now - self._tried_at.get(address, -RETRY_S) >= RETRY_S:
                self._tried_at[address] = now
                self._begin(self._try_anew(address) if address in self._left else self._try(address))
        self._write()

    def _follow(self, listing: _List) -> None:
        before, listing.known = listing.known, frozenset(_full(address) for address in listing.read())
        self._wanted |= listing.known - before
        self._anew |= listing.known - before
        for address in listing.known:
            self._unwanted.pop(address, None)
        for address in before - listing.known:
            self._wanted.discard(address)
            self._unwanted[address] = listing.why

    async def _answer(self, request: HostRequest) -> None:
        try:
            if request.do == "add":
                address = _full(request.what)
                self._unwanted.pop(address, None)
                self._tried_at[address] = asyncio.get_running_loop().time()
                await self._hosts.add(address)
                self._wanted.add(address)
            else:
                of = {host.name: host.address for host in self._hosts.states() if host.state != "gone"}
                if (address := of.get(request.what)) is not None:  # one that is lost is refused, and still tried again
                    self._left.add(address)
                await self._hosts.drain(request.what, "titan-rl hosts asked for it")
        except Exception as error:  # of whatever kind: whoever asked waits for the answer
            self._answers[request.id] = reason(error)
        else:
            self._answers[request.id] = ""
        self._write()

    async def _try_anew(self, address: str) -> None:
        """Nobody waits for a host that was drained: what keeps it away is not told."""
        with contextlib.suppress(Exception):
            if await self._hosts.is_new(address):
                await self._try(address)

    async def _try(self, address: str) -> None:
        try:
            await self._hosts.add(address)
        except Exception as error:  # also of that machine, whose disk may be full
            if self._told.get(address) != (why := reason(error)):
                self._told[address] = why
                self._tell(f"the host at {address} is not taken in: {why}")
        else:
            self._told.pop(address, None)

    async def _drain(self, name: str, why: str) -> None:
        try:
            await self._hosts.drain(name, why)
        except Exception as error:
            self._tell(f"host {name} cannot be drained: {reason(error)}")

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _write(self) -> None:
        hosts = list(self._hosts.states())
        self._history.note(hosts, self._hosts.take_silences())
        history = self._history
        states = HostStates(hosts, dict(self._answers), list(history.events), dict(history.counts))
        if states == self._written:
            return
        try:
            self._files.write(states)
        except OSError as error:
            if not self._cannot_write:
                self._tell(f"which hosts the run has is not written down for now, and the run goes on: {error}")
            self._cannot_write = True
        else:
            self._written, self._cannot_write = states, False


def _full(address: str) -> str:
    return join_address(*split_address(address))
