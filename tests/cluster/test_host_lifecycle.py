"""Lifecycle of hosts: in any order of events each host is in one state, and follows only allowed transitions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from titan_rl.cluster.hosts.lifecycle import (
    PRESENT,
    TRANSITIONS,
    Demand,
    HostLifecycles,
    HostListener,
    HostRecord,
    HostState,
)

ADDRESSES = [f"10.0.0.{number}:22222" for number in range(1, 5)]
HOSTNAMES = st.sampled_from(["a", "b"])


class Listener(HostListener):
    """Reconstructs the states from events alone."""

    def __init__(self) -> None:
        self.states: dict[str, HostState] = {}
        self.events: list[tuple[HostState, HostState]] = []

    def host_changed(self, record: HostRecord, before: HostState) -> None:
        assert self.states.get(record.address, HostState.WANTED) is before
        self.states[record.address] = record.state
        self.events.append((before, record.state))


class Lifecycles(RuleBasedStateMachine):
    """Hosts that join, fail to join, start, drain, leave and are lost, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycles = HostLifecycles()
        self.listener = Listener()
        self.lifecycles.subscribe(self.listener)
        self.drained: set[str] = set()  # and neither listed nor up since

    def hosts_in(self, *states: HostState) -> list[HostRecord]:
        return [record for record in self.lifecycles if record.state in states]

    @rule(address=st.sampled_from(ADDRESSES))
    def want(self, address: str) -> None:
        before = self.lifecycles.of(address).state
        self.lifecycles.of(address).demand = Demand.WANTED
        self.drained.discard(address)
        assert self.lifecycles.of(address).state is before

    @rule(address=st.sampled_from(ADDRESSES))
    def join(self, address: str) -> None:
        state = self.lifecycles.of(address).state
        if HostState.JOINING in TRANSITIONS[state]:
            assert self.lifecycles.join(address).name == ""
        else:
            with pytest.raises(ValueError, match="cannot become joining"):
                self.lifecycles.join(address)

    @precondition(lambda self: self.hosts_in(HostState.JOINING))
    @rule(data=st.data(), state=st.sampled_from([HostState.STARTING, HostState.UP]), hostname=HOSTNAMES)
    def joined(self, data: st.DataObject, state: HostState, hostname: str) -> None:
        record = data.draw(st.sampled_from(self.hosts_in(HostState.JOINING)))
        taken = {other.name for other in self.hosts_in(*PRESENT)}
        record.name = hostname if hostname not in taken else f"{hostname}-{record.address}"
        record.host = SimpleNamespace()
        self.lifecycles.joined(record, state)
        if state is HostState.UP:
            self.drained.discard(record.address)
        assert self.lifecycles.named(record.name) is record
        assert self.lifecycles.ended(record.name) is None, "it has the name now"

    @precondition(lambda self: self.hosts_in(HostState.JOINING))
    @rule(data=st.data(), lost=st.sampled_from(["", "its worker has ended"]))
    def join_failed(self, data: st.DataObject, lost: str) -> None:
        record = data.draw(st.sampled_from(self.hosts_in(HostState.JOINING)))
        before = record.before
        self.lifecycles.join_failed(record, lost)
        if before is not None and before[0]:
            assert (record.name, record.state, record.reason) == before
        elif before is None:
            assert record.state is (HostState.LOST if lost else HostState.WANTED)

    @precondition(lambda self: len([*self.lifecycles]) > 0)
    @rule(data=st.data(), state=st.sampled_from([HostState.UP, HostState.DRAINING, HostState.LEFT, HostState.LOST]))
    def move(self, data: st.DataObject, state: HostState) -> None:
        record = data.draw(st.sampled_from([*self.lifecycles]))
        before, num_events = record.state, len(self.listener.events)
        if before is HostState.JOINING:  # by `joined` and `join_failed` alone
            return
        if state in TRANSITIONS[before]:
            is_wanted = record.demand is not Demand.NONE
            self.lifecycles.move(record, state, "asked to")
            if state is HostState.DRAINING and is_wanted:
                self.drained.add(record.address)
            elif state is HostState.UP:
                self.drained.discard(record.address)
            assert (record.state, record.reason) == (state, "asked to")
        else:
            with pytest.raises(ValueError, match=f"is {before}, and cannot become {state}"):
                self.lifecycles.move(record, state, "asked to")
            assert record.state is before
            assert len(self.listener.events) == num_events

    @invariant()
    def events_match_states_and_follow_the_table(self) -> None:
        assert all(after in TRANSITIONS[before] for before, after in self.listener.events)
        for record in self.lifecycles:
            assert record.state is self.listener.states.get(record.address, HostState.WANTED)

    @invariant()
    def names_are_unique_and_only_present_hosts_have_handles(self) -> None:
        names = [record.name for record in self.lifecycles.present]
        assert len(set(names)) == len(names)
        assert all(record.host is not None for record in self.lifecycles.present)
        assert not any(record.host for record in self.hosts_in(HostState.WANTED, HostState.LEFT, HostState.LOST))

    @invariant()
    def statuses_list_each_host_once(self) -> None:
        shown = self.lifecycles.statuses()
        here = [status.name for status in shown if status.state in ("in the run", "draining")]
        here += [status.name for status in shown if status.state == "joining" and status.name]
        assert here == [*dict.fromkeys(here)]
        assert sorted(here) == sorted(record.name for record in self.lifecycles.present)
        names = [status.name for status in shown if status.name]
        assert len(names) == len(set(names))
        wanted = {record.address for record in self.hosts_in(HostState.WANTED)}
        assert not wanted & {status.address for status in shown}

    @invariant()
    def drained_hosts_wait_for_a_restart_until_listed_or_up(self) -> None:
        waiting = {record.address for record in self.lifecycles if record.demand is Demand.AFTER_RESTART}
        assert waiting == self.drained


TestLifecycles = Lifecycles.TestCase


def test_host_listed_while_draining_is_wanted_after_leaving() -> None:
    lifecycles = HostLifecycles()
    lifecycles.add(SimpleNamespace(name="a", worker=ADDRESSES[0]))
    record = lifecycles.of(ADDRESSES[0])
    record.demand = Demand.WANTED
    lifecycles.move(record, HostState.DRAINING)
    assert record.demand is Demand.AFTER_RESTART
    record.demand = Demand.WANTED
    lifecycles.move(record, HostState.LEFT)
    assert record.demand is Demand.WANTED


def test_unlisted_host_is_drained_only_once() -> None:
    lifecycles = HostLifecycles()
    lifecycles.add(SimpleNamespace(name="a", worker=ADDRESSES[0]))
    record = lifecycles.of(ADDRESSES[0])
    record.demand = Demand.UNLISTED
    for state in (HostState.DRAINING, HostState.UP):  # the drain fails
        lifecycles.move(record, state)
        assert record.demand is Demand.NONE


def test_transitions_reach_and_leave_every_state() -> None:
    assert TRANSITIONS.keys() == set(HostState)
    assert {state for reached in TRANSITIONS.values() for state in reached} == set(HostState)
    assert all(TRANSITIONS.values())
