"""One Chrome trace of all processes of a run, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.viewer.trace.events import Traces
from titan_rl.viewer.trace.lanes import ProcessTrace, Spans, sorted_lanes

PUBLISHED, PULLED = "publish copy", "pull"


def chrome_trace(folder: Path) -> Iterator[bytes]:
    """The JSON, in parts.

    Args:
        folder: of a run. One without traces gives a trace without events.
    """
    events = _events(Traces(folder / "trace"))
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    for number, event in enumerate(events):
        yield (b",\n" if number else b"\n") + msgspec.json.encode(event)
    yield b"\n]}\n"


def _events(traces: Traces) -> Iterator[Mapping[str, Any]]:
    processes = traces.read()
    tids = count(1)
    places: dict[tuple[str, str], dict[str, int]] = {}
    are_apart = len({trace.host for trace in processes.values() if trace.host}) > 1
    for pid, (process, trace) in enumerate(processes.items(), start=1):
        yield _name("process_name", pid, 0, {"name": process})
        if are_apart and trace.host:
            yield _name("process_labels", pid, 0, {"labels": f"on {trace.host}"})
        yield _name("process_sort_index", pid, 0, {"sort_index": pid})
        for lane in sorted_lanes(trace.lanes):
            place = places[process, lane] = {"pid": pid, "tid": next(tids)}
            yield _name("thread_name", **place, args={"name": lane})
            yield _name("thread_sort_index", **place, args={"sort_index": place["tid"]})
            for span in trace.lanes[lane]:
                times = {"ts": _us(span.start), "dur": _us(span.end - span.start)}
                yield {"ph": "X", "name": span.name, "cat": span.kind, **place, **times, "args": span.args}
        for name, counts in trace.counters.items():
            for one in counts:
                yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(one.start), "args": one.args}
    yield from _flows(traces, processes, places)


def _flows(
    traces: Traces, processes: Mapping[str, ProcessTrace], places: Mapping[tuple[str, str], dict[str, int]]
) -> Iterator[Mapping[str, Any]]:
    """An arrow from the copy of each version to every pull of it."""
    ids = count(1)
    published, pulled = traces.names.places([PUBLISHED, PULLED])
    copies: dict[int, tuple[int, dict[str, int]]] = {}
    pulls: list[tuple[int, int, dict[str, int]]] = []
    for process, trace in processes.items():
        for lane, found in trace.lanes.items():
            spans = found.spans
            if process.startswith("trainer"):
                for version, start in _versions(spans[spans["name"] == published]):
                    copies.setdefault(version, (start, places[process, lane]))
            elif process.startswith("generator"):
                for version, start in _versions(spans[spans["name"] == pulled]):
                    pulls.append((version, start, places[process, lane]))
    for version, start, to in pulls:
        if version in copies:
            copied, place = copies[version]
            about = {"name": f"version {version}", "cat": "sync", "id": next(ids)}
            yield {"ph": "s", **about, **place, "ts": copied}
            yield {"ph": "f", "bp": "e", **about, **to, "ts": start}


def _versions(spans: Spans) -> list[tuple[int, int]]:
    return [*zip(spans["version"].tolist(), spans["start"].tolist(), strict=True)]


def _name(name: str, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
