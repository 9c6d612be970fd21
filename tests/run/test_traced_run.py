"""Trace of a run: its timeline agrees with the metrics, and it is cut back when steps are repeated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from test_controller import Rig

from titan_rl import EngineLoop, LocalReplica
from titan_rl.core.console import LOG
from titan_rl.core.tracing import spans
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.run.json_lines import cut_traces
from titan_rl.viewer.app import make_viewer
from titan_rl.viewer.runs import Runs
from titan_rl.viewer.timeline import chrome_trace, timeline
from titan_rl.viewer.trace import ProcessTrace, Traces, TraceSpan

IDLE_OF_THE_LOOP = ("time/wait_for_rollouts_s", "sync/wait_for_pull_s")


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    """A run of 6 steps, trained and recorded."""
    loop = EngineLoop(lambda: ScriptedEngine(script=lambda context: context[-1] - 1))
    await loop.start()
    rig = Rig(tmp_path, steps=6, replica=LocalReplica("engine", loop, lambda version: []))
    with spans.recording(rig.run_dir.trace, "controller", 1 << 22, LOG):
        await rig.run()
    await loop.close()
    for step, metrics in rig.records:
        rig.run_dir.write_metrics(step, metrics)
    return rig


def traced(rig: Rig) -> ProcessTrace:
    return Traces(rig.run_dir.trace).read()["controller"]


def seconds(spans: Iterable[TraceSpan], *names: str) -> float:
    return sum(span.end - span.start for span in spans if span.name in names)


async def test_timeline_idle_times_match_the_metrics(rig: Rig):
    lanes = traced(rig).lanes
    steps = [metrics for _, metrics in rig.records if "time/train_s" in metrics]
    loop = lanes["steps"]
    began = min(span.start for span in loop if span.name == "waiting for a batch")
    ended = max(span.end for span in loop if span.name == "begin to publish")
    origin = min(span.start for lane in lanes.values() for span in lane)
    window = timeline(Traces(rig.run_dir.trace), began - origin, ended - origin)
    (shown,) = [idle for idle in window["idle"] if idle["lane"] == "controller/steps"]
    assert shown["seconds"] == pytest.approx(sum(m[name] for m in steps for name in IDLE_OF_THE_LOOP), rel=0.02)
    assert shown["seconds"] > 0
    assert seconds(loop, "train step") == pytest.approx(sum(m["time/train_s"] for m in steps), rel=0.02, abs=1e-4)

    engine = lanes["engine"]
    pulls = sorted((span for span in engine if span.name == "pull"), key=lambda span: span.end)
    between = timeline(Traces(rig.run_dir.trace), pulls[0].end - origin, pulls[-1].end - origin)
    (shown,) = [idle for idle in between["idle"] if idle["lane"] == "controller/engine"]
    assert shown["seconds"] == pytest.approx(sum(m["engine/idle_s"] for m in steps), rel=0.02, abs=1e-3)


async def test_loop_and_engine_lanes_have_no_gaps(rig: Rig):
    lanes = traced(rig).lanes
    stages = sorted(lanes["steps"], key=lambda span: span.start)
    for before, after in pairwise(stages):
        assert after.start == pytest.approx(before.end, abs=2e-6)
    inner = ("load", "read back", "verify")
    engine = sorted((span for span in lanes["engine"] if span.name not in inner), key=lambda span: span.start)
    for before, after in pairwise(engine):
        assert after.start == pytest.approx(before.end, abs=2e-6)
    assert {span.name for span in engine} == {"idle", "generating", "pull"}


async def test_trace_contains_every_part_of_a_step(rig: Rig):
    lanes = traced(rig).lanes
    rollouts = [span for lane, found in lanes.items() if lane.startswith("rollout") for span in found]
    assert {span.name for span in rollouts} == {"rollout", "env reset", "env step", "request"}
    assert {span.args.get("version") for span in lanes["sync"]} == set(range(7))
    assert {span.name for lane, found in lanes.items() if lane.startswith("slot") for span in found} >= {
        "running",
        "training",
    }
    assert {span.name for lane, found in lanes.items() if lane.startswith("reward") for span in found} == {"turns"}
    at_once = 2 * 3 + 2 * 2  # rollouts of a step, and of a concurrent validation
    assert sum(lane.startswith("rollout") for lane in lanes) <= at_once


async def test_chrome_trace_merges_all_processes(rig: Rig):
    (rig.run_dir.trace / "trainer.jsonl").write_text(
        '{"ph":"M","name":"thread_name","pid":7,"tid":3,"args":{"name":"publish"}}\n'
        '{"cat":"sync","ph":"X","name":"publish copy","pid":7,"tid":3,"ts":5000000,"dur":10,"args":{"version":2}}\n'
        '{"cat":"sync","ph":"X","na'
    )
    (rig.run_dir.trace / "generator-0.jsonl").write_text(
        '{"ph":"M","name":"thread_name","pid":8,"tid":3,"args":{"name":"engine"}}\n'
        '{"cat":"sync","ph":"X","name":"pull","pid":8,"tid":3,"ts":5000100,"dur":10,"args":{"version":2}}\n'
    )
    trace = json.loads(b"".join(chrome_trace(rig.run_dir.path)))
    events = trace["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == ["controller", "trainer", "generator-0"]
    lanes = {event["tid"]: event for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in "XMCsf"
        assert event["pid"] in processes
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] > 0
            assert lanes[event["tid"]]["pid"] == event["pid"], "no lane has spans of two processes"
    start, finish = [event for event in events if event["ph"] in "sf"]
    assert (start["id"], start["ts"], processes[start["pid"]]) == (finish["id"], 5000000, "trainer")
    assert (finish["ts"], finish["bp"], processes[finish["pid"]]) == (5000100, "e", "generator-0")


async def test_cut_traces_removes_steps_to_repeat(rig: Rig):
    cut_traces(rig.run_dir.trace, 4)
    lanes = traced(rig).lanes
    until = max(span.end for span in lanes["steps"] if span.args["step"] <= 4)
    assert max(span.args["step"] for span in lanes["steps"]) == 4
    assert all(span.start < until for lane in lanes.values() for span in lane)
    assert [span.args["version"] for span in lanes["sync"] if span.name == "pull"] == [0, 1, 2, 3, 4]
    cut_traces(rig.run_dir.trace, -1)
    assert "steps" not in traced(rig).lanes


async def test_viewer_serves_the_timeline(rig: Rig):
    app = make_viewer(Runs([rig.run_dir.path]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = (await client.get("/api/runs/run/timeline", params={"width": 10, "from": 0})).json()
        trace = (await client.get("/api/runs/run/trace.json")).json()
        wrong = await client.get("/api/runs/run/timeline", params={"width": 0})
    assert {lane["lane"] for lane in answer["lanes"]} == traced(rig).lanes.keys()
    assert [step for step, _, _ in answer["steps"]] == [1, 2, 3, 4, 5, 6]
    assert answer["bottleneck"]["name"] in answer["bottleneck"]["sentence"]
    assert len(trace["traceEvents"]) > 100
    assert wrong.status_code == 400
    steps = next(lane for lane in answer["lanes"] if lane["lane"] == "steps")
    assert len(steps["spans"]) <= 2 * 10 + 1
