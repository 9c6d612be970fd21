"""Timeline of a run at screen resolution, idle times of its lanes, and its Chrome trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from titan_rl.viewer.trace import Lane, Names, ProcessTrace, Spans, Traces, plane_of, sorted_lanes

STEPS = "steps"
"""The controller's lane with the stages of the training loop."""

BETWEEN_STEPS = ("validation", "checkpoint")
"""Kinds of spans of the training loop that are not part of a step."""

ENGINE = "engine"
"""Lane with an engine's states."""

HOST = "host "
"""Prefix of the controller's lanes with the states of hosts."""

_FAR_S = 1e11  # seconds; longer than any run, and fits into a column


def timeline(
    traces: Traces,
    first: float | None = None,
    last: float | None = None,
    width: int = 1000,
    seen: tuple[float, float] | None = None,
    patience_s: float = math.inf,
) -> dict[str, Any]:
    """Make the answer to /api/runs/{id}/timeline, without its bottleneck.

    Args:
        first, last: Seconds since the run began. By default the whole run.
        width: Width in pixels. Spans narrower than a pixel are joined to a "busy" span, with their share of it in its
            args.
        seen: Seconds between which idle times are counted. By default those between `first` and `last`.
        patience_s: Time for which the trace is read, in seconds; see `Traces.read`.

    Returns:
        read: Share of the trace that has been read, in [0, 1].
        from, to, seen: Bounds of the timeline, and of the counted idle times, in seconds since the run began.
        lanes: List of {"process", "lane", "kind", "host", "spans": [[start, end, name, args], ...]}. The args have
            "depth", which is 0 for a span that lies in no other, "idle" if the span waits, and "kind" if it is not the
            lane's. The host is left out if all processes are on one host.
        idle: List of {"lane", "seconds", "share"} of the lanes that are always in one state, for the part of the lane
            within `seen`.
        steps: List of [step, start, end].
        syncs: List of [seconds, version], the times at which the last replica had a version.
    """
    processes, names = traces.read(patience_s), traces.names
    began, ended = bounds(processes)
    start = began + (0 if first is None else _us(first))
    end = max(start, ended if last is None else began + _us(last))
    counted = (start, end) if seen is None else (began + _us(seen[0]), began + _us(seen[1]))
    waits = names.idle()
    are_apart = len({trace.host for trace in processes.values() if trace.host}) > 1
    lanes: list[dict[str, Any]] = []
    idle: list[dict[str, Any]] = []

    def seconds(microseconds: int) -> float:
        return (microseconds - began) / 1e6

    for process, trace in processes.items():
        for lane in sorted_lanes(trace.lanes):
            spans = trace.lanes[lane].spans
            if waits[spans["kind"]].any() and (waited := idle_time(spans, waits, *counted)) is not None:
                idle.append({"lane": f"{process}/{lane}", **waited})
            window = spans[: np.searchsorted(spans["start"], end, "right")]
            window = window[window["end"] >= start]
            if len(window):
                kind = kind_of(lane, spans, names)
                drawn = _drawn(trace.lanes[lane], window, (end - start) / max(1, width), kind, names, waits)
                shown = [[seconds(lo), seconds(hi), name, args] for lo, hi, name, args in drawn]
                host = {"host": trace.host} if are_apart else {}
                lanes.append({"process": process, "lane": lane, "kind": kind, **host, "spans": shown})
    steps = [(step, lo, hi) for step, lo, hi in step_times(processes, names) if hi >= start and lo <= end]
    syncs = [(at, version) for version, at in sync_times(processes, names) if start <= at <= end]
    return {
        "read": traces.share_read,
        "from": seconds(start),
        "to": seconds(end),
        "seen": [seconds(at) for at in counted],
        "lanes": lanes,
        "idle": idle,
        "steps": [[step, seconds(lo), seconds(hi)] for step, lo, hi in steps],
        "syncs": [[seconds(at), version] for at, version in syncs],
    }


def kind_of(lane: str, spans: Spans, names: Names) -> str:
    """Return the plane that most of the lane's time belongs to. Special kinds are "controller" for the stages of the
    training loop, which belong to all planes, and "host" for the states of a host."""
    if lane == STEPS:
        return "controller"
    if lane.startswith(HOST):
        return "host"
    lengths = np.bincount(spans["kind"], (spans["end"] - spans["start"]).astype(float))
    seconds: dict[str, float] = {}
    for kind in np.unique(spans["kind"]):
        plane = plane_of(names[kind])
        seconds[plane] = seconds.get(plane, 0.0) + float(lengths[kind])
    return max(seconds, key=lambda plane: seconds[plane])


def bounds(processes: Mapping[str, ProcessTrace]) -> tuple[int, int]:
    """Return the start of the first span and the end of the last, in microseconds since 1970; zeros without spans."""
    every = [lane.spans for trace in processes.values() for lane in trace.lanes.values()]
    starts = [int(spans["start"][0]) for spans in every]
    return min(starts, default=0), max((int(spans["end"].max()) for spans in every), default=0)


def idle_time(spans: Spans, waits: NDArray[np.bool_], start: int, end: int) -> dict[str, float] | None:
    """Return the seconds and share of a lane's idle time between two times; None if the lane has no spans there."""
    covered = min(end, int(spans["end"].max())) - max(start, int(spans["start"][0]))
    if covered < 0:
        return None
    idle = spans[waits[spans["kind"]]]
    inside = np.minimum(idle["end"], end) - np.maximum(idle["start"], start)
    seconds = int(inside[inside > 0].sum())
    return {"seconds": seconds / 1e6, "share": seconds / covered if covered else 0.0}


def step_times(processes: Mapping[str, ProcessTrace], names: Names) -> list[tuple[int, int, int]]:
    """Return each step with the start of its first stage and the end of its last, in microseconds since 1970.
    Validations and checkpoints are not stages of a step."""
    trace = processes.get("controller")
    if trace is None or STEPS not in trace.lanes:
        return []
    spans = trace.lanes[STEPS].spans
    spans = spans[(spans["step"] > 0) & ~np.isin(spans["kind"], names.indices(BETWEEN_STEPS))]
    if not len(spans):
        return []
    spans = spans[np.argsort(spans["step"], kind="stable")]
    steps, firsts = np.unique(spans["step"], return_index=True)
    starts = np.minimum.reduceat(spans["start"], firsts)
    ends = np.maximum.reduceat(spans["end"], firsts)
    return [*zip(steps.tolist(), starts.tolist(), ends.tolist(), strict=True)]


def sync_times(processes: Mapping[str, ProcessTrace], names: Names) -> list[tuple[int, int]]:
    """Return each version with the end of its last pull by an engine, in microseconds since 1970."""
    (pull,) = names.indices(["pull"])
    found: dict[int, int] = {}
    for trace in processes.values():
        if ENGINE in trace.lanes:
            spans = trace.lanes[ENGINE].spans
            spans = spans[(spans["name"] == pull) & (spans["version"] >= 0)]
            for version, end in zip(spans["version"].tolist(), spans["end"].tolist(), strict=True):
                found[version] = max(end, found.get(version, end))
    return sorted(found.items())


def _drawn(
    lane: Lane, spans: Spans, pixel: float, kind: str, names: Names, waits: NDArray[np.bool_]
) -> list[tuple[int, int, str, dict[str, Any]]]:
    wide = spans["end"] - spans["start"] >= pixel
    found = _joined(spans[~wide & (spans["depth"] == 0) & ~waits[spans["kind"]]], pixel)
    shown = spans[wide]
    for span, args in zip(shown.tolist(), lane.args(shown), strict=True):
        start, end, _, _, name, of_kind, _, _, depth, _ = span
        args["depth"] = depth
        if waits[of_kind]:
            args["idle"] = True
        if (plane := plane_of(names[of_kind])) != kind:
            args["kind"] = plane
        found.append((start, end, names[name], args))
    found.sort(key=lambda span: (span[0], -span[1]))
    return found


def _joined(narrow: Spans, pixel: float) -> list[tuple[int, int, str, dict[str, Any]]]:
    """Join spans less than a pixel apart to one, with their share of it."""
    if not len(narrow):
        return []
    apart = narrow["start"][1:] - narrow["end"][:-1] > pixel
    firsts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    busy = np.add.reduceat(narrow["end"] - narrow["start"], firsts).tolist()
    starts = narrow["start"][firsts].tolist()
    ends = np.maximum.reduceat(narrow["end"], firsts).tolist()
    return [
        (start, end, "busy", {"share": part / (end - start), "depth": 0})
        for start, end, part in zip(starts, ends, busy, strict=True)
        if end > start
    ]


def _us(seconds: float) -> int:
    return round(min(max(seconds, -_FAR_S), _FAR_S) * 1e6)


WIDTHS = (1000, 300, 100)
"""Widths in pixels at which a timeline is stored. The first one that fits is used."""


def small_timeline(traces: Traces, most_bytes: int) -> dict[str, Any] | None:
    """Make the whole timeline, as JSON of at most `most_bytes` bytes. Returns None if it does not fit, or without
    traces."""
    found: dict[str, Any] = {}
    for width in WIDTHS:
        found = timeline(traces, width=width)
        if not found["lanes"]:
            return None
        if len(msgspec.json.encode(found)) <= most_bytes:
            return found
    found["lanes"] = [lane for lane in found["lanes"] if lane["kind"] not in ("environment", "reward", "request")]
    return found if len(msgspec.json.encode(found)) <= most_bytes else None


PUBLISHED, PULLED = "publish copy", "pull"


def chrome_trace(folder: Path) -> Iterator[bytes]:
    """Yield the JSON of a run's Chrome trace in parts.

    Args:
        folder: Folder of a run. Without traces, the result has no events.
    """
    events = _events(Traces(folder / "trace"))
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    for number, event in enumerate(events):
        yield (b",\n" if number else b"\n") + msgspec.json.encode(event)
    yield b"\n]}\n"


def _events(traces: Traces) -> Iterator[Mapping[str, Any]]:
    processes = traces.read()
    tids = count(1)
    lane_ids: dict[tuple[str, str], dict[str, int]] = {}
    are_apart = len({trace.host for trace in processes.values() if trace.host}) > 1
    for pid, (process, trace) in enumerate(processes.items(), start=1):
        yield _name("process_name", pid, 0, {"name": process})
        if are_apart and trace.host:
            yield _name("process_labels", pid, 0, {"labels": f"on {trace.host}"})
        yield _name("process_sort_index", pid, 0, {"sort_index": pid})
        for lane in sorted_lanes(trace.lanes):
            ids = lane_ids[process, lane] = {"pid": pid, "tid": next(tids)}
            yield _name("thread_name", **ids, args={"name": lane})
            yield _name("thread_sort_index", **ids, args={"sort_index": ids["tid"]})
            for span in trace.lanes[lane]:
                times = {"ts": _chrome_us(span.start), "dur": _chrome_us(span.end - span.start)}
                yield {"ph": "X", "name": span.name, "cat": span.kind, **ids, **times, "args": span.args}
        for name, counts in trace.counters.items():
            for one in counts:
                yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _chrome_us(one.start), "args": one.args}
    yield from _flows(traces, processes, lane_ids)


def _flows(
    traces: Traces, processes: Mapping[str, ProcessTrace], lane_ids: Mapping[tuple[str, str], dict[str, int]]
) -> Iterator[Mapping[str, Any]]:
    """Make an arrow from the copy of each version to each of its pulls."""
    ids = count(1)
    published, pulled = traces.names.indices([PUBLISHED, PULLED])
    copies: dict[int, tuple[int, dict[str, int]]] = {}
    pulls: list[tuple[int, int, dict[str, int]]] = []
    for process, trace in processes.items():
        for lane, found in trace.lanes.items():
            spans = found.spans
            if process.startswith("trainer"):
                for version, start in _versions(spans[spans["name"] == published]):
                    copies.setdefault(version, (start, lane_ids[process, lane]))
            elif process.startswith("generator"):
                for version, start in _versions(spans[spans["name"] == pulled]):
                    pulls.append((version, start, lane_ids[process, lane]))
    for version, start, to in pulls:
        if version in copies:
            copied, source = copies[version]
            about = {"name": f"version {version}", "cat": "sync", "id": next(ids)}
            yield {"ph": "s", **about, **source, "ts": copied}
            yield {"ph": "f", "bp": "e", **about, **to, "ts": start}


def _versions(spans: Spans) -> list[tuple[int, int]]:
    return [*zip(spans["version"].tolist(), spans["start"].tolist(), strict=True)]


def _name(name: str, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _chrome_us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
