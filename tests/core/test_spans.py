"""Recording of traces: spans, lanes, tracks and files."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.core.console import LOG, ConsoleLines
from titan_rl.core.tracing import spans
from titan_rl.core.tracing.recorder import TraceFile
from titan_rl.core.tracing.spans import Track, span
from titan_rl.testing.clock import ManualClock
from titan_rl.viewer.trace import Traces


@pytest.fixture
def console() -> ConsoleLines:
    return ConsoleLines()


@pytest.fixture
def recorded(tmp_path: Path, console: ConsoleLines) -> Iterator[Path]:
    with spans.recording(tmp_path, "controller", 1 << 20, console):
        yield tmp_path / "controller.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lanes(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the spans by the names of their lanes."""
    events = read(path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def assert_nested(found: list[dict[str, Any]]) -> None:
    """Check that any two spans of a lane are nested or disjoint."""
    open_until: list[float] = []
    for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
        while open_until and open_until[-1] <= event["ts"]:  # they are rounded
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1]
        open_until.append(end)


def test_nested_span_uses_the_lane_of_its_parent(recorded: Path):
    with span("rollout", "environment", lane="rollout", rollout="g/0"), span("env step", "environment", fine=True):
        pass
    spans.flush()
    inner, outer = lanes(recorded)["rollout"]
    assert (inner["name"], outer["name"], outer["args"]) == ("env step", "rollout", {"rollout": "g/0"})
    assert outer["ts"] <= inner["ts"]
    assert inner["cat"] == "fine,environment"


async def test_lanes_are_reused_without_overlap(recorded: Path):
    async def rollout(number: int) -> None:
        for _ in range(3):
            with span("rollout", "environment", lane="rollout"):
                await asyncio.sleep(0)
                with span("env step", "environment"):
                    await asyncio.sleep(0)

    await asyncio.gather(*(rollout(number) for number in range(64)))
    spans.flush()
    found = lanes(recorded)
    assert len(found) == 64
    assert sum(map(len, found.values())) == 64 * 3 * 2
    for lane in found.values():
        assert_nested(lane)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6))
async def test_spans_of_a_lane_are_nested_across_concurrent_tasks(tmp_path_factory: pytest.TempPathFactory, plan: Any):
    """Tasks outlive the span in which they were created, and begin other spans in it."""

    async def work(waits: list[int]) -> None:
        with span("outer", "x", lane="pool" if len(waits) % 2 else None):
            for wait in waits:
                for _ in range(wait):
                    await asyncio.sleep(0)
                with span("inner", "x"):
                    tasks.append(asyncio.create_task(later(wait)))
                    await asyncio.sleep(0)

    async def later(wait: int) -> None:
        with span("later", "x"):
            for _ in range(wait):
                await asyncio.sleep(0)

    folder = tmp_path_factory.mktemp("trace")
    tasks: list[asyncio.Task[None]] = []
    with spans.recording(folder, "p", 1 << 20, LOG):
        await asyncio.gather(*map(work, plan))
        await asyncio.gather(*tasks)
    found = lanes(folder / "p.jsonl")
    assert sum(map(len, found.values())) == sum(1 + 2 * len(waits) for waits in plan)
    for lane in found.values():
        assert_nested(lane)


def test_track_has_no_gaps_and_its_seconds_match_its_spans(recorded: Path):
    track = Track("engine", "generator")
    for _ in range(3):
        track.enter("generating", steps=2)
        track.enter("idle", idle=True)
    track.close()
    seconds = track.take()
    spans.flush()
    found = lanes(recorded)["engine"]
    for before, after in pairwise(found):
        assert after["ts"] == before["ts"] + before["dur"]
    idle = [event for event in found if event["cat"] == "generator,idle"]
    assert sum(event["dur"] for event in idle) / 1e6 == pytest.approx(seconds["idle"], abs=3e-6)
    assert seconds.keys() == {"generating", "idle"}


def test_time_of_a_continuing_state_is_counted_once():
    clock = ManualClock()
    track = Track("train", "trainer", clock)
    track.enter("step")
    clock.seconds = 3.0
    assert track.take() == {"step": 3.0}
    clock.seconds = 4.0
    track.enter("idle", idle=True)
    clock.seconds = 6.0
    assert track.take() == {"step": 1.0, "idle": 2.0}


def test_long_span_is_written_in_parts_and_read_as_one(recorded: Path):
    track = Track("train", "trainer")
    track.enter("wait for rollouts", idle=True)
    with span("save", "checkpoint", lane="save", step=3):
        for _ in range(3):
            spans.flush()
            seen = whole(recorded)
            assert {lane: [name for _, _, name, _ in found] for lane, found in seen.items()} == {
                "train": ["wait for rollouts"],
                "save": ["save"],
            }
    track.enter("step", step=3)
    track.close()
    spans.flush()
    read = whole(recorded)
    assert [name for _, _, name, _ in read["train"]] == ["wait for rollouts", "step"]
    assert read["train"][0][1] == read["train"][1][0], "without a gap"
    assert read["train"][0][0] == seen["train"][0][0], "its start is unchanged"
    assert [(name, args) for _, _, name, args in read["save"]] == [("save", {"step": 3})]
    assert len(lanes(recorded)["save"]) == 4


def test_open_spans_are_written_when_recording_ends(tmp_path: Path, console: ConsoleLines):
    track = Track("steps", "trainer")
    with spans.recording(tmp_path, "controller", 1 << 20, console):
        track.enter("train step", step=3)
        save = span("save", "checkpoint", lane="save").__enter__()
        ended_us = time.time_ns() // 1000
    track.close()
    save.__exit__(None, None, None)
    found = whole(tmp_path / "controller.jsonl")
    assert [(name, args) for _, _, name, args in found["steps"]] == [("train step", {"step": 3})]
    assert [name for _, _, name, _ in found["save"]] == ["save"]
    assert all(end * 1e6 >= ended_us for ((_, end, _, _),) in found.values())


def whole(path: Path) -> dict[str, list[tuple[float, float, str, dict[str, Any]]]]:
    """Return the spans as the viewer reads them, by lane: (start, end, name, args)."""
    (trace,) = Traces(path.parent).read().values()
    return {name: [(one.start, one.end, one.name, one.args) for one in lane] for name, lane in trace.lanes.items()}


def test_span_measures_time_without_recording(tmp_path: Path):
    with span("publish", "sync", lane="sync") as took:
        sum(range(1000))
    assert took.seconds > 0
    assert spans.tracing_of_children() is None


def test_resumed_run_appends_to_its_trace(tmp_path: Path):
    for attempt in range(2):
        with spans.recording(tmp_path, "trainer", 1 << 20, LOG), span("step", "trainer", lane="train", step=attempt):
            pass
    assert [event["args"]["step"] for event in lanes(tmp_path / "trainer.jsonl")["train"]] == [0, 1]


def test_processes_of_a_machine_share_one_clock(tmp_path: Path):
    tracing = spans.Tracing.begin(tmp_path, 1 << 20)
    ends: list[float] = []
    for process in ("a", "b"):
        spans.begin_recording(tracing, process)
        with span("one after the other", "x", lane="x"):
            pass
        spans.end_recording()
        (event,) = lanes(tmp_path / f"{process}.jsonl")["x"]
        assert all(event["ts"] >= end for end in ends)
        ends.append(event["ts"] + event["dur"])


def test_different_monotonic_clock_falls_back_to_the_time_of_day(tmp_path: Path):
    """As in a container of the same machine, which has the same boot id."""
    tracing = spans.Tracing.begin(tmp_path, 1 << 20)
    spans.begin_recording(dataclasses.replace(tracing, offset_ns=tracing.offset_ns - 500_000 * 10**9), "a")
    with span("far off", "x", lane="x"):
        pass
    spans.end_recording()
    (event,) = lanes(tmp_path / "a.jsonl")["x"]
    assert abs(event["ts"] / 1e6 - time.time()) < 60


def test_host_with_wrong_clocks_uses_the_controller_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tracing = spans.Tracing.begin(tmp_path, 1 << 20)
    began = time.time()
    here, here_ns, steady_ns = time.time, time.time_ns, time.monotonic_ns
    monkeypatch.setattr(time, "time_ns", lambda: here_ns() - 3600 * 10**9)
    monkeypatch.setattr(time, "monotonic_ns", lambda: steady_ns() + 500_000 * 10**9)
    spans.begin_recording(tracing.on_host(500_000 * 10**9), "a")
    with span("here", "x", lane="x"):
        pass
    spans.end_recording()
    (event,) = lanes(tmp_path / "a.jsonl")["x"]
    assert began - 0.01 <= event["ts"] / 1e6 <= here() + 0.01


def test_trace_survives_a_killed_process(tmp_path: Path):
    program = """
import os, signal, sys
from pathlib import Path
from titan_rl.core.tracing import spans
spans.begin_recording(spans.Tracing.begin(Path(sys.argv[1]), 1 << 20), "trainer")
with spans.span("step", "trainer", lane="train"):
    pass
spans.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    path = tmp_path / "trainer.jsonl"
    assert len(lanes(path)["train"]) == 1
    with path.open("a") as file:
        file.write('{"ph":"X","na')
    with spans.recording(tmp_path, "trainer", 1 << 20, LOG), span("step", "trainer", lane="train"):
        pass
    lines = path.read_text().splitlines()
    assert sum('"step"' in line for line in lines) == 2
    assert sum(line.endswith("}") for line in lines) == len(lines) - 1


def test_full_disk_ends_the_trace_but_not_the_run(
    tmp_path: Path, console: ConsoleLines, monkeypatch: pytest.MonkeyPatch
):
    def full(self: TraceFile, lines: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(TraceFile, "append", full)
    with spans.recording(tmp_path, "controller", 1 << 20, console):
        for _ in range(2):
            with span("step", "trainer", lane="train") as took:
                pass
            spans.flush()
    assert took.seconds > 0
    (text,) = console
    assert text.startswith("the trace of controller ends here, and the run continues without it: ")


def test_full_trace_file_drops_the_oldest_fine_spans_first(tmp_path: Path):
    path = tmp_path / "controller.jsonl"
    file = TraceFile(path, 20_000)
    file.append([b'{"ph":"M","name":"process_name"}\n'])
    for step in range(100):
        file.append([b'{"cat":"trainer","step":%d}\n' % step])
        file.append([b'{"cat":"fine,environment","step":%d,"call":%d}\n' % (step, call) for call in range(20)])
        assert path.stat().st_size <= 20_000
    file.close()
    events = read(path)
    assert events[0] == {"ph": "M", "name": "process_name"}
    assert [event["step"] for event in events if event.get("cat") == "trainer"] == list(range(100))
    fine = [event["step"] for event in events if event.get("cat") == "fine,environment"]
    assert fine == sorted(fine)
    assert fine[-20:] == [99] * 20


def test_dropping_the_oldest_spans_uses_little_memory(tmp_path: Path):
    """The memory would stay fragmented for the lifetime of the process."""
    most_bytes = 2_000_000
    file = TraceFile(tmp_path / "controller.jsonl", most_bytes)
    line = b'{"cat":"fine,environment","step":1}\n'
    file.append([line * (most_bytes // len(line))])
    tracemalloc.start()
    try:
        file.append([line, line])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    file.close()
    assert (tmp_path / "controller.jsonl").stat().st_size < most_bytes * 3 / 4
    assert peak < most_bytes / 10
