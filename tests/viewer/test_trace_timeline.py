"""Timeline computed from traces: spans, kinds of lanes, idle times, steps, and loaded versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_rl.testing.clock import ManualClock
from titan_rl.viewer.timeline import timeline
from titan_rl.viewer.trace import Traces

BEGAN = 1_700_000_000.0
Span = tuple[float, float, str, str, dict[str, object]]


def span(start: float, end: float, name: str, kind: str, **args: object) -> Span:
    return start, end, name, kind, args


def engine(*pulls: tuple[float, float, int]) -> list[Span]:
    states = [span(0, 50, "generating", "generator"), *(span(a, b, "pull", "sync", version=v) for a, b, v in pulls)]
    return [*states, span(60, 100, "idle", "generator,idle")]


def line(lane: str, at: Span) -> str:
    start, end, name, kind, args = at
    times = {"ts": round((BEGAN + start) * 1e6), "dur": round((end - start) * 1e6)}
    return json.dumps({"cat": kind, "ph": "X", "name": name, "tid": len(lane), **times, "args": args}) + "\n"


def named(lane: str) -> str:
    return json.dumps({"ph": "M", "name": "thread_name", "tid": len(lane), "args": {"name": lane}}) + "\n"


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    steps = [
        span(0, 90, "validation", "validation"),
        span(90, 99, "train step", "trainer", step=1),
        span(99, 100, "waiting for a batch", "scheduler,idle", step=1),
    ]
    lanes = {
        "controller": ("steps", steps),
        "generator-0": ("engine", engine((50, 51, 1), (51, 51.015625, 2))),
        "generator-1": ("engine", engine((52, 53, 1))),
    }
    for process, (lane, spans) in lanes.items():
        (tmp_path / f"{process}.jsonl").write_text(named(lane) + "".join(line(lane, one) for one in spans))
    return Traces(tmp_path)


def test_versions_are_marked_at_the_last_engines_sync(traces: Traces) -> None:
    assert timeline(traces, width=100)["syncs"] == [[53.0, 1], [51.015625, 2]]
    assert timeline(traces, 52.0, 60.0)["syncs"] == [[53.0, 1]]


def test_lane_kind_is_its_most_common_and_other_spans_name_theirs(traces: Traces) -> None:
    answer = timeline(traces, 50.0, 58.0)
    steps, first, _ = answer["lanes"]
    assert (steps["kind"], first["kind"]) == ("controller", "generator")
    assert steps["spans"] == [[0.0, 90.0, "validation", {"depth": 0, "kind": "validation"}]]
    pull = next(one for one in first["spans"] if one[2] == "pull")
    assert pull == [50.0, 51.0, "pull", {"version": 1, "depth": 0, "kind": "sync"}]


def test_waiting_counts_as_idle_time_of_its_lane(traces: Traces) -> None:
    answer = timeline(traces)
    assert next(one for one in answer["lanes"][1]["spans"] if one[2] == "idle") == [
        60.0,
        100.0,
        "idle",
        {"depth": 0, "idle": True},
    ]
    assert answer["idle"][1] == {"lane": "generator-0/engine", "seconds": 40.0, "share": 0.4}
    assert answer["steps"] == [[1, 90.0, 100.0]]


def test_idle_times_cover_the_visible_window(traces: Traces) -> None:
    answer = timeline(traces, 0.0, 100.0, seen=(70.0, 80.0))
    assert answer["idle"][1] == {"lane": "generator-0/engine", "seconds": 10.0, "share": 1.0}
    assert (answer["from"], answer["to"], answer["seen"]) == (0.0, 100.0, [70.0, 80.0])


def test_step_excludes_validation_and_checkpoint_after_it(traces: Traces, tmp_path: Path) -> None:
    with (tmp_path / "controller.jsonl").open("a") as file:
        file.write(line("steps", span(100, 108, "validation", "validation", step=1)))
        file.write(line("steps", span(108, 109, "checkpoint", "checkpoint", step=1)))
    assert timeline(traces)["steps"] == [[1, 90.0, 100.0]]


@pytest.mark.parametrize("wrong", [1e300, float("nan")])
def test_invalid_timestamp_skips_only_its_line(traces: Traces, tmp_path: Path, wrong: float) -> None:
    known = timeline(traces)
    with (tmp_path / "controller.jsonl").open("a") as file:
        file.write(f'{{"ph": "X", "name": "a", "tid": 1, "ts": {wrong}, "dur": 5}}\n'.replace("nan", "NaN"))
    assert timeline(traces) == known


def test_narrow_spans_are_merged_without_extending_them(traces: Traces) -> None:
    answer = timeline(traces, 0.0, 100.0, width=10)
    (steps, _, _) = answer["lanes"]
    assert [one[:3] for one in steps["spans"]] == [[0.0, 90.0, "validation"], [90.0, 99.0, "busy"]]


def test_invalid_lines_are_skipped_and_others_keep_their_args(traces: Traces, tmp_path: Path) -> None:
    path = tmp_path / "generator-1.jsonl"
    with path.open("a") as file:
        file.write('{"cat":"sync","ph":"X","na\n\n' + line("engine", span(100, 110, "pull", "sync", version=9, é="ü")))
    assert timeline(traces)["syncs"][-1] == [110.0, 9]
    shown = timeline(traces, 99.0, 111.0)["lanes"][-1]["spans"][-1]
    assert shown == [100.0, 110.0, "pull", {"version": 9, "é": "ü", "depth": 0, "kind": "sync"}]


def test_span_depth_does_not_depend_on_write_order(traces: Traces, tmp_path: Path) -> None:
    inner, outer, next_one = span(101, 102, "load", "sync"), span(100, 103, "pull", "sync"), span(103, 104, "x", "sync")
    with (tmp_path / "controller.jsonl").open("a") as file:
        file.writelines(line("steps", one) for one in (inner, next_one))
    timeline(traces)
    with (tmp_path / "controller.jsonl").open("a") as file:
        file.write(line("steps", outer))
    drawn = timeline(traces, 99.5, 104.0)["lanes"][0]["spans"]
    assert [(one[2], one[3]["depth"]) for one in drawn[1:]] == [("pull", 0), ("load", 1), ("x", 0)]


def test_long_trace_is_shown_incrementally(tmp_path: Path) -> None:
    spans = [span(at, at + 0.5, "train step", "trainer", step=1) for at in range(60_000)]
    (tmp_path / "controller.jsonl").write_text(named("steps") + "".join(line("steps", one) for one in spans))
    (tmp_path / "trainer.jsonl").write_text(named("train") + line("train", spans[0]) + '{"cut')
    traces = Traces(tmp_path, clock=ManualClock(tick_s=1.0))
    first = timeline(traces, patience_s=0.0)
    assert 0 < first["read"] < 1
    assert 0 < first["to"] < 60_000
    seen = [first["read"]]
    while seen[-1] < 1:
        seen.append(timeline(traces, patience_s=0.0)["read"])
        assert seen[-1] > seen[-2]
    assert timeline(traces)["to"] == 59_999.5
