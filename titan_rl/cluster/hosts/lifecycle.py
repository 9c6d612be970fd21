"""Lifecycle of the hosts of a run: one state machine for all of them, and their history for display, metrics and the
timeline."""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any

from titan_rl.cluster.processes.roles import Role
from titan_rl.core.clock import CLOCK, Clock
from titan_rl.core.run_files import HostEvent
from titan_rl.core.tracing.spans import Track


class HostState(StrEnum):
    """State of a host in its lifecycle. The value is its text in `hosts.json`."""

    WANTED = "wanted"  # requested, but not in contact with the run
    JOINING = "joining"  # being contacted, checked and prepared
    STARTING = "starting"  # part of the run, while its processes start
    UP = "in the run"
    DRAINING = "draining"  # its processes finish their work; nothing new is started there
    LEFT = "left"  # drained
    LOST = "gone"


PRESENT = frozenset({HostState.STARTING, HostState.UP, HostState.DRAINING})
"""States of a host that is part of the run and has a handle."""

TRANSITIONS: Mapping[HostState, frozenset[HostState]] = {
    HostState.WANTED: frozenset({HostState.JOINING}),
    # A failed attempt returns to the state before it; a host that is lost during its first attempt is LOST.
    HostState.JOINING: frozenset({HostState.WANTED, HostState.STARTING, HostState.UP, HostState.LEFT, HostState.LOST}),
    HostState.STARTING: frozenset({HostState.UP, HostState.DRAINING, HostState.LEFT, HostState.LOST}),
    HostState.UP: frozenset({HostState.DRAINING, HostState.LEFT, HostState.LOST}),
    HostState.DRAINING: frozenset({HostState.UP, HostState.LEFT, HostState.LOST}),  # UP after a failed drain
    # WANTED once another host has taken its name.
    HostState.LEFT: frozenset({HostState.JOINING, HostState.WANTED}),
    HostState.LOST: frozenset({HostState.JOINING, HostState.WANTED}),
}


class Demand(Enum):
    """Demand of a run for a host, independent of the host's state."""

    NONE = auto()  # it may stay, and is not tried again once it has ended
    WANTED = auto()  # it is tried while it is not part of the run
    AFTER_RESTART = auto()  # it was drained, and is tried again once its worker has been restarted
    UNLISTED = auto()  # it is drained once it is up


DEMAND_AFTER: Mapping[HostState, Mapping[Demand, Demand]] = {
    HostState.JOINING: {Demand.UNLISTED: Demand.NONE},  # it is added by a request
    HostState.UP: {Demand.AFTER_RESTART: Demand.WANTED},
    HostState.DRAINING: {Demand.WANTED: Demand.AFTER_RESTART, Demand.UNLISTED: Demand.NONE},
}
"""Changes of the demand that follow from the new state of a host."""


@dataclass(frozen=True, slots=True)
class HostStatus:
    """State of one host as shown in the terminal and in `hosts.json`.

    Args:
        name: Name of the host; "" while it is unknown.
        address: Address of its worker, for example "10.0.0.1:22222".
        state: "joining" until its processes are up, then "in the run", "draining", "left" or "gone".
        reason: Reason why it drains, has left or is lost.
        processes: Names of its processes.
    """

    name: str
    address: str
    state: str
    reason: str = ""
    processes: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class HostRecord:
    """One host of a run. Only `HostLifecycles` changes its state.

    Attributes:
        address: Address of its worker; "" for this machine.
        name: Name, unique in the run; "" before it is known.
        reason: Reason for its state.
        host: Its `Host` handle; None before it has a name and after it has ended.
        leaving: Reason that its worker announced for an imminent shutdown; "" if there is none.
        before: Name, state and reason before the current attempt to join, if it had left or was lost.
        worker_id: Identity of the worker that it had when it was drained.
        demand: Whether the run tries to have it.
        drain_reason: Reason for draining it once it is up, if it is unlisted.
        tried_at: Time of the latest attempt to join, by the event loop's clock.
        complaint: Reason shown for the latest attempt that failed; "" after a success.
    """

    address: str
    state: HostState = HostState.WANTED
    name: str = ""
    reason: str = ""
    host: Any = None
    leaving: str = ""
    before: tuple[str, HostState, str] | None = None
    worker_id: str = ""
    demand: Demand = Demand.NONE
    drain_reason: str = ""
    tried_at: float = float("-inf")
    complaint: str = ""

    @property
    def is_present(self) -> bool:
        return self.state in PRESENT


class HostListener:
    """Listener for host events. Does nothing by default."""

    def host_changed(self, record: HostRecord, before: HostState) -> None:
        """Handle a change of a host's state."""

    def host_leaving(self, record: HostRecord) -> None:
        """Handle a host's announcement that it is about to shut down."""


class HostLifecycles:
    """All hosts that a run has, has had, or tries to have, each in one state. `TRANSITIONS` has the allowed changes.

    Listeners receive each change after it was made, in the order in which they subscribed.
    """

    def __init__(self) -> None:
        self._records: dict[str, HostRecord] = {}  # by address; this machine by its name
        self._listeners: list[HostListener] = []

    def __iter__(self) -> Iterator[HostRecord]:
        return iter(list(self._records.values()))

    @property
    def present(self) -> list[HostRecord]:
        """Hosts that are part of the run, in the order in which they joined."""
        return [record for record in self if record.is_present]

    def of(self, address: str) -> HostRecord:
        """Return the record of the host with this address; a new one in `WANTED` if there is none."""
        return self._records.setdefault(address, HostRecord(address))

    def named(self, name: str) -> HostRecord | None:
        """Return the record of the host that is part of the run under this name, or joins under it."""
        active = (*PRESENT, HostState.JOINING)
        return next((record for record in self if record.name == name and record.state in active), None)

    def ended(self, name: str) -> HostRecord | None:
        """Return the record of the host that had this name and has left or is lost."""
        over = (HostState.LEFT, HostState.LOST)
        return next((record for record in self if record.name == name and record.state in over), None)

    def subscribe(self, listener: HostListener) -> None:
        self._listeners.append(listener)

    def add(self, host: Any) -> None:
        """Add a host that needs no preparation to the run."""
        record = HostRecord(host.worker)
        self._records[host.worker or host.name] = record
        self.move(record, HostState.JOINING)
        record.name, record.host = host.name, host
        self.move(record, HostState.UP)

    def join(self, address: str) -> HostRecord:
        """Start an attempt to have the host of this address join. The order of these calls is the order of joins."""
        record = self.of(address)
        if record.state in (HostState.LEFT, HostState.LOST):
            record.before = record.name, record.state, record.reason
        self.move(record, HostState.JOINING)
        record.name = record.leaving = ""
        self._records[address] = self._records.pop(address)
        return record

    def joined(self, record: HostRecord, state: HostState) -> None:
        """Note that a host has joined: its processes start (`STARTING`), or the run starts with it (`UP`)."""
        for other in self:
            if other is record:
                continue
            if other.before is not None and other.before[0] == record.name:
                other.before = None
            if other.name == record.name and other.state in (HostState.LEFT, HostState.LOST):
                other.name = ""
                self.move(other, HostState.WANTED)
        record.before = None
        self.move(record, state)

    def join_failed(self, record: HostRecord, lost: str = "") -> None:
        """Return a host to the state before an attempt to join that failed.

        Args:
            lost: Reason of the loss, if the host was lost after its worker had answered; otherwise "".
        """
        if record.state is not HostState.JOINING:
            return
        name, state, reason = record.before or ("", HostState.WANTED, "")
        record.before = None
        if lost and not name:
            name, state, reason = "", HostState.LOST, lost
        record.name, record.host = name, None
        self.move(record, state, reason)

    def move(self, record: HostRecord, state: HostState, reason: str = "") -> None:
        """Change the state of a host, and notify all listeners.

        Raises:
            ValueError: The change is not allowed.
        """
        before = record.state
        if state not in TRANSITIONS[before]:
            raise ValueError(f"host {record.name or record.address} is {before}, and cannot become {state}")
        record.state, record.reason = state, reason
        record.demand = DEMAND_AFTER.get(state, {}).get(record.demand, record.demand)
        if not record.is_present and state is not HostState.JOINING:
            record.host = None
        for listener in self._listeners:
            listener.host_changed(record, before)

    def announce_leaving(self, record: HostRecord, reason: str) -> None:
        record.leaving = reason
        for listener in self._listeners:
            listener.host_leaving(record)

    def statuses(self, processes: Mapping[str, Sequence[str]] | None = None) -> list[HostStatus]:
        """Return the status of each host: those in the run, then those joining, then those that have left or are lost.

        Args:
            processes: Names of the processes of each host.
        """
        present, joining, ended = list[HostStatus](), list[HostStatus](), list[HostStatus]()
        for record in self:
            names = tuple((processes or {}).get(record.name, ()))
            match record.state:
                case HostState.STARTING:
                    present.append(HostStatus(record.name, record.address, "joining", "its processes start", names))
                case HostState.UP | HostState.DRAINING:
                    present.append(HostStatus(record.name, record.address, record.state.value, record.reason, names))
                case HostState.JOINING:
                    joining.append(HostStatus("", record.address, "joining"))
                    if record.before is not None and record.before[0]:
                        name, state, reason = record.before
                        ended.append(HostStatus(name, record.address, state.value, reason))
                case HostState.LEFT | HostState.LOST:
                    ended.append(HostStatus(record.name, record.address, record.state.value, record.reason))
                case HostState.WANTED:
                    pass
        joining.sort(key=lambda status: status.address)
        ended.sort(key=lambda status: not status.name)  # hosts without a name are last
        return [*present, *joining, *ended]


HERE = ("in the run", "draining")
BECOMES = {"in the run": "joined", "draining": "drains", "left": "left", "gone": "lost"}
"""Events of hosts by their new state. A drain that was cancelled does not count as a join."""
COUNTED = "joined", "left", "lost"
MOST_EVENTS = 200


class HostHistory:
    """History of hosts, built from successive statuses. It stays empty for a run that has had only one host.

    Attributes:
        states: Latest statuses.
        events: The newest `MOST_EVENTS` events. A host that was lost before it had a name is named by its address.
        counts: Number of hosts that "joined", "left" and were "lost" so far.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self.states: Sequence[HostStatus] = ()
        self.events: list[HostEvent] = []
        self.counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self._is_initialized = False
        self._known: dict[str, str] = {}  # state of each host by its name, or by its address if it has no name
        self._counts: Counter[str] = Counter()  # number of events since the last metrics
        self._silences: dict[str, float] = {}  # longest silence of each host since the last metrics, in seconds
        self._lanes: dict[str, Track] = {}

    @property
    def is_of_several(self) -> bool:
        return len(self._known) > 1

    def note(self, states: Sequence[HostStatus], silences: Mapping[str, float] | None = None) -> None:
        """Record the current statuses.

        Args:
            silences: Longest time in seconds without a heartbeat of each host since the previous call.
        """
        self.states = states
        for name, seconds in (silences or {}).items():
            self._silences[name] = max(seconds, self._silences.get(name, 0.0))
        for host in states:
            if host.name:
                self._known.pop(host.address, None)
            key = host.name or host.address
            if (host.name or host.state == "gone") and (before := self._known.get(key)) != host.state:
                self._known[key] = host.state
                self._became(key, host, before)
        self._is_initialized = True
        if self.is_of_several:
            for host in states:
                if host.name:
                    contextvars.copy_context().run(self._draw, host)

    def look(self) -> Sequence[HostStatus]:
        """Statuses to display."""
        return self.states if self.is_of_several else ()

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the time since the previous call.

        Returns:
            Nothing for a run with a single host. Otherwise hosts/present and hosts/draining, the current numbers;
            hosts/joined, hosts/left and hosts/lost, the numbers of events; and for each present host
            hosts/<host>/generators and, if it is on another machine, hosts/<host>/silence_s.
        """
        silences, self._silences = self._silences, {}
        counts, self._counts = self._counts, Counter()
        if not self.is_of_several:
            return {}
        present = [host for host in self.states if host.state in HERE]
        metrics = {
            "hosts/present": float(len(present)),
            "hosts/draining": float(sum(host.state == "draining" for host in present)),
            **{f"hosts/{what}": float(counts[what]) for what in COUNTED},
        }
        for host in present:
            generators = sum(Role.of(name) is Role.GENERATOR for name in host.processes)
            metrics[f"hosts/{host.name}/generators"] = float(generators)
            if host.name in silences:
                metrics[f"hosts/{host.name}/silence_s"] = silences[host.name]
        return metrics

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def _became(self, name: str, host: HostStatus, before: str | None) -> None:
        if (not self._is_initialized and host.state != "gone") or (before == "draining" and host.state == "in the run"):
            return
        if (what := BECOMES.get(host.state)) is not None:
            self._counts[what] += 1
            if what in self.counts:
                self.counts[what] += 1
            self.events.append(HostEvent(self._clock.wall(), name, what, host.reason))
            del self.events[:-MOST_EVENTS]

    def _draw(self, host: HostStatus) -> None:
        """Draw the states of a host as a lane of the timeline."""
        lane = self._lanes.setdefault(host.name, Track(f"host {host.name}", "host"))
        if lane.state != host.state:
            lane.enter(host.state, kind="lost" if host.state == "gone" else None, address=host.address)
            if host.reason:
                lane.note(why=host.reason)
