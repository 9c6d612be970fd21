"""States of the hosts of a run, and their history for the screen, metrics and the timeline."""

from __future__ import annotations

import contextvars
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from titan_rl.cluster.processes.roles import Role
from titan_rl.core.run_files import HostEvent
from titan_rl.core.tracing.spans import Track


@dataclass(frozen=True, slots=True)
class HostState:
    """One host.

    Args:
        address: of its worker, by which it is asked for: "10.0.0.1:22222".
        name: "" while it is not known yet.
        state: "joining", until its processes are up, "in the run", "draining", "left", once it is drained, or "gone",
            where it was lost.
        reason: why it drains, left, or is gone.
        processes: names of those that it has.
    """

    name: str
    address: str
    state: str
    reason: str = ""
    processes: tuple[str, ...] = ()


HERE = ("in the run", "draining")
BECOMES = {"in the run": "joined", "draining": "drains", "left": "left", "gone": "lost"}
"""What has happened to a host that is in another state than before. One that drains no more has not joined."""
COUNTED = "joined", "left", "lost"
MOST_EVENTS = 200


class HostHistory:
    """Made of what is said of the hosts again and again. A run that has and had one host has nothing to tell.

    Attributes:
        states: those that were noted last.
        events: what became of hosts that were there when the run began, and of others; the newest `MOST_EVENTS`. One
            that was lost before it had a name goes by its address.
        counts: of all that became of hosts, how many "joined", "left" and were "lost".

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.states: Sequence[HostState] = ()
        self.events: list[HostEvent] = []
        self.counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self._begun = False
        self._known: dict[str, str] = {}  # the state of each, by its name, or by its address where it has none
        self._counts: Counter[str] = Counter()  # of what happened since the last metrics
        self._silences: dict[str, float] = {}  # the longest of each host since the last metrics
        self._lanes: dict[str, Track] = {}

    @property
    def is_of_several(self) -> bool:
        return len(self._known) > 1

    def note(self, states: Sequence[HostState], silences: Mapping[str, float] | None = None) -> None:
        """How they stand now.

        Args:
            silences: the longest time, in seconds, for which nothing was heard of each since this was last called.
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
        self._begun = True
        if self.is_of_several:
            for host in states:
                if host.name:
                    contextvars.copy_context().run(self._draw, host)

    def look(self) -> Sequence[HostState]:
        """What is to be shown of them."""
        return self.states if self.is_of_several else ()

    def take_metrics(self) -> dict[str, float]:
        """Of the time since this was last called.

        Returns:
            hosts/present, hosts/draining: how many there are now; hosts/joined, hosts/left, hosts/lost: how many did;
            hosts/<host>/generators, and hosts/<host>/silence_s where it is on another machine, of each that is there.
            Nothing where there is one host.
        """
        silences, self._silences = self._silences, {}
        counts, self._counts = self._counts, Counter()
        if not self.is_of_several:
            return {}
        here = [host for host in self.states if host.state in HERE]
        metrics = {
            "hosts/present": float(len(here)),
            "hosts/draining": float(sum(host.state == "draining" for host in here)),
            **{f"hosts/{what}": float(counts[what]) for what in COUNTED},
        }
        for host in here:
            generators = sum(Role.of(name) is Role.GENERATOR for name in host.processes)
            metrics[f"hosts/{host.name}/generators"] = float(generators)
            if host.name in silences:
                metrics[f"hosts/{host.name}/silence_s"] = silences[host.name]
        return metrics

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def _became(self, name: str, host: HostState, before: str | None) -> None:
        if (not self._begun and host.state != "gone") or (before == "draining" and host.state == "in the run"):
            return
        if (what := BECOMES.get(host.state)) is not None:
            self._counts[what] += 1
            if what in self.counts:
                self.counts[what] += 1
            self.events.append(HostEvent(self._clock(), name, what, host.reason))
            del self.events[:-MOST_EVENTS]

    def _draw(self, host: HostState) -> None:
        """A lane of the timeline for each host, of the states that it is in."""
        lane = self._lanes.setdefault(host.name, Track(f"host {host.name}", "host"))
        if lane.state != host.state:
            lane.enter(host.state, kind="lost" if host.state == "gone" else None, address=host.address)
            if host.reason:
                lane.note(why=host.reason)
