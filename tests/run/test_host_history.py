"""Host history of a run: each change once, as an event, a count in the metrics, and a lane of the timeline."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.cluster.hosts.lifecycle import BECOMES, MOST_EVENTS, HostHistory, HostStatus
from titan_rl.core.console import LOG
from titan_rl.core.tracing import spans
from titan_rl.testing.clock import ManualClock
from titan_rl.viewer.trace import Traces

STATES = ["in the run", "draining", "left", "gone"]


def host(name: str, state: str = "in the run", reason: str = "", *processes: str) -> HostStatus:
    return HostStatus(name, f"10.0.0.{name[1:]}:22222", state, reason, processes)


def test_single_host_run_has_no_host_metrics() -> None:
    history = HostHistory()
    for _ in range(2):
        history.note([host("h1", "in the run", "", "trainer", "generator-0")], {"h1": 0.25})
        assert history.take_metrics() == {}
        assert history.look() == ()
    assert history.events == []


def test_host_lost_before_the_first_look_is_reported() -> None:
    history = HostHistory()
    history.note([host("h1"), host("h2", "gone", "silent")])
    assert [(event.host, event.what, event.why) for event in history.events] == [("h2", "lost", "silent")]
    assert history.take_metrics()["hosts/lost"] == 1
    history.note([host("h1"), host("h2")])
    assert history.events[-1].what == "joined"


def test_lost_host_without_a_name_is_reported_once_by_address() -> None:
    history = HostHistory()
    early = HostStatus("", "10.0.0.2:22222", "gone", "its worker has ended")
    for _ in range(3):
        history.note([host("h1"), early])
        history.note([host("h1"), HostStatus("", early.address, "joining")])
    assert [(event.host, event.what, event.why) for event in history.events] == [
        ("10.0.0.2:22222", "lost", "its worker has ended")
    ]
    assert history.take_metrics()["hosts/lost"] == 1
    history.note([host("h1"), host("h2")])
    assert [event.host for event in history.events] == ["10.0.0.2:22222", "h2"]
    history.note([host("h1"), host("h2", "gone", "silent")])
    assert history.counts == {"joined": 1, "left": 0, "lost": 2}
    history.note([host("h1"), early, host("h2", "gone", "silent")])
    assert history.counts["lost"] == 3, "it is lost again"


def test_host_changes_are_events_and_per_step_counts() -> None:
    clock = ManualClock(100.0)
    history = HostHistory(clock)
    first, second = host("h1", "in the run", "", "trainer"), host("h2", "in the run", "", "generator-0", "generator-1")
    history.note([first, second], {"h1": 0.5, "h2": 0.25})
    history.note([first, second], {"h1": 0.25, "h2": 0.75})
    assert history.take_metrics() == {
        "hosts/present": 2.0,
        "hosts/draining": 0.0,
        "hosts/joined": 0.0,
        "hosts/left": 0.0,
        "hosts/lost": 0.0,
        "hosts/h1/generators": 0.0,
        "hosts/h1/silence_s": 0.5,
        "hosts/h2/generators": 2.0,
        "hosts/h2/silence_s": 0.75,
    }
    assert history.events == [], "the run began with these hosts"
    clock.seconds = 130.0
    history.note([first, host("h2", "gone", "silent"), HostStatus("", "10.0.0.3:22222", "joining")])
    history.note([first, host("h2", "gone", "silent"), host("h3")])
    history.note([first, host("h2", "gone", "silent"), host("h3", "draining", "asked to")])
    metrics = history.take_metrics()
    assert [metrics[f"hosts/{name}"] for name in ("present", "draining", "joined", "left", "lost")] == [2, 1, 1, 0, 1]
    assert "hosts/h2/generators" not in metrics
    events = [(event.at, event.host, event.what, event.why) for event in history.events]
    assert events == [(130, "h2", "lost", "silent"), (130, "h3", "joined", ""), (130, "h3", "drains", "asked to")]
    assert history.take_metrics()["hosts/lost"] == 0, "counted in the previous step"


@given(st.lists(st.sampled_from(STATES), min_size=1, max_size=30))
def test_each_host_change_is_reported_once(states: list[str]) -> None:
    history = HostHistory()
    counted: Counter[str] = Counter()
    history.note([host("h1"), host("h2", states[0])])
    for state in states:
        for _ in range(2):
            history.note([host("h1"), host("h2", state)])
        counted.update({name: int(value) for name, value in history.take_metrics().items()})
    changes = [now for before, now in pairwise(states) if before != now and (before, now) != ("draining", "in the run")]
    changes = [*states[:1], *changes] if states[0] == "gone" else changes  # lost while the run started
    assert [event.what for event in history.events] == [BECOMES[state] for state in changes]
    for what in ("joined", "left", "lost"):
        assert history.counts[what] == counted[f"hosts/{what}"]
        assert counted[f"hosts/{what}"] == sum(event.what == what for event in history.events)


def test_the_newest_events_are_kept() -> None:
    history = HostHistory()
    for number in range(2 * MOST_EVENTS):
        history.note([host("h1"), host("h2", STATES[3 * (number % 2)])])
    assert len(history.events) == MOST_EVENTS
    assert history.events[-1].what == "lost"


def test_each_host_has_a_lane_of_its_states(tmp_path: Path) -> None:
    with spans.recording(tmp_path, "controller", 1 << 20, LOG):
        history = HostHistory()
        with spans.span("around", "trainer", lane="loop"):
            history.note([host("h1"), host("h2")])
            with spans.span("inner", "trainer"):
                history.note([host("h1"), host("h2", "gone", "silent")])
        history.close()
    lanes = Traces(tmp_path).read()["controller"].lanes
    assert lanes.keys() == {"loop", "host h1", "host h2"}
    assert [(span.name, span.kind) for span in lanes["host h2"]] == [("in the run", "host"), ("gone", "lost")]
    assert [span.args.get("why") for span in lanes["host h2"]] == [None, "silent"]
    assert [span.name for span in lanes["loop"]] == ["around", "inner"]
