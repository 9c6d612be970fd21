"""Traces of a run's processes, read as they grow, as columns of spans, because a long run has a million spans."""

from __future__ import annotations

import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from titan_rl.core.clock import CLOCK, Clock
from titan_rl.core.files import Chunk, Tail

IDLE = "idle"
"""Category of a span in which its lane waits for others."""

Spans = NDArray[np.void]
"""Array with the dtype `SPAN`."""

SPAN = np.dtype(
    [(name, "i8") for name in ("start", "end", "offset")]
    + [(name, "i4") for name in ("length", "name", "kind", "step", "version", "depth")]
    + [("goes_on", "?")]
)
"""A span: start and end in microseconds since 1970, offset and length of its line in the file, indices of its name and
kind in `Names`, step and version from its args or -1, the number of spans of its lane in which it lies, and whether it
is one part of a longer span whose next part follows."""

_LANES = ("steps", "sync", "train", "publish", "save", "engine", "checkpoint", "slot", "rollout", "reward", "request")


class _Line(msgspec.Struct, gc=False):
    args: dict[str, Any] = {}


_LINE = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span of a lane. Times are in seconds since 1970."""

    start: float
    end: float
    name: str
    kind: str
    args: dict[str, Any]


class Names:
    """Table of names, in which each name has an index."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}
        self._names: list[str] = []

    def __getitem__(self, index: int) -> str:
        return self._names[index]

    def indices(self, names: Iterable[str]) -> list[int]:
        return [index if (index := self._indices.get(name)) is not None else self._add(name) for name in names]

    def idle(self) -> NDArray[np.bool_]:
        """Return whether spans of a kind wait, by index of the kind."""
        return np.array([name.endswith(IDLE) for name in self._names], bool)

    def _add(self, name: str) -> int:
        self._names.append(name)
        return self._indices.setdefault(name, len(self._names) - 1)


class Lane:
    """Spans of one lane, from the file of its process."""

    def __init__(self, path: Path, names: Names) -> None:
        self._path = path
        self._names = names
        self._spans = np.empty(0, SPAN)
        self._fresh: list[Spans] = []

    def add(self, spans: Spans) -> None:
        self._fresh.append(spans)

    @property
    def spans(self) -> Spans:
        """Spans ordered by start. Of spans with the same start, longer ones are first."""
        if self._fresh:
            spans = np.concatenate([self._spans, *self._fresh])
            self._fresh.clear()
            spans = _joined(spans)
            self._spans = spans = spans[np.lexsort((-spans["end"], spans["start"]))]
            # Two adjacent spans may overlap by a microsecond, because the clock is read twice between them.
            ends = np.sort(np.maximum(spans["end"], spans["start"] + 2))
            spans["depth"] = np.arange(len(spans)) - np.searchsorted(ends, spans["start"] + 1, "right")
        return self._spans

    def __iter__(self) -> Iterator[TraceSpan]:
        spans = self.spans
        for span, args in zip(spans, self.args(spans), strict=True):
            name, kind = self._names[span["name"]], self._names[span["kind"]]
            yield TraceSpan(float(span["start"] / 1e6), float(span["end"] / 1e6), name, kind, args)

    def args(self, spans: Spans) -> list[dict[str, Any]]:
        """Read the arguments of some spans from the file; empty if the file has been truncated meanwhile."""
        if not len(spans):
            return []
        try:
            with self._path.open("rb") as file:
                fd = file.fileno()
                lines = [
                    os.pread(fd, length, offset)
                    for offset, length in zip(spans["offset"].tolist(), spans["length"].tolist(), strict=True)
                ]
        except OSError:
            lines = [b""] * len(spans)
        return [_args(line) for line in lines]


@dataclass(slots=True)
class ProcessTrace:
    """Trace of one process: its lanes and its counters by name.

    Attributes:
        host: Host on which it runs, or ran last; "" if the trace does not contain it.
    """

    host: str = ""
    lanes: dict[str, Lane] = field(default_factory=dict[str, Lane])
    counters: dict[str, Lane] = field(default_factory=dict[str, Lane])


def plane_of(kind: str) -> str:
    """Part of the run that a span of this kind belongs to."""
    return kind.removeprefix("fine,").removesuffix(f",{IDLE}")


def sorted_lanes(lanes: Iterable[str]) -> list[str]:
    """Lanes in display order: "rollout 2" before "rollout 10"."""
    return sorted(lanes, key=lambda lane: sort_key(lane, _LANES))


def sort_key(name: str, order: Sequence[str]) -> tuple[int, str, int]:
    """Sort key: the index of the first prefix in `order`, and the number at the end of the name."""
    matched = re.fullmatch(r"(.*?)[ -]?(\d*)", name, re.DOTALL)
    assert matched is not None
    kind, number = matched[1], int(matched[2] or 0)
    return next((i for i, one in enumerate(order) if kind.startswith(one)), len(order)), kind, number


def _joined(spans: Spans) -> Spans:
    """Join the parts of each span, keeping the line of the last part."""
    if not spans["goes_on"].any():
        return spans
    spans = spans[np.lexsort((spans["start"], spans["kind"], spans["name"]))]
    same = (spans["name"][1:] == spans["name"][:-1]) & (spans["kind"][1:] == spans["kind"][:-1])
    follows = same & spans["goes_on"][:-1] & (spans["start"][1:] == spans["end"][:-1])
    firsts = np.concatenate([[True], ~follows])
    joined = spans[np.concatenate([~follows, [True]])]
    joined["start"] = spans["start"][firsts]
    return joined


def _args(line: bytes) -> dict[str, Any]:
    try:
        args = _LINE.decode(line).args
        args.pop("goes_on", None)
        return args
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}


_PROCESSES = ("controller", "trainer", "generator", "rollout-worker")
_LARGEST = 2**31
_Microseconds = Annotated[float, msgspec.Meta(ge=-1e17, le=1e17)]  # fits into a column, as does the sum of two


class _Args(msgspec.Struct, gc=False):
    """Arguments of a span that are queried across the whole run."""

    step: Any = None
    version: Any = None
    name: Any = None
    host: Any = None
    goes_on: Any = None


class _Event(msgspec.Struct, gc=False):
    """A Chrome trace event. Times are in microseconds since 1970."""

    ph: str
    name: str
    tid: int
    cat: str = ""
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: _Args | None = None


_NO_ARGS = _Args()


class Traces:
    """Traces of one run. Each line is read once.

    Args:
        folder: Folder `trace` of the run's folder.

    Attributes:
        lock: Held by each thread that uses the traces, if there are several.
        share_read: Share of the bytes of all files that has been read, in [0, 1].
    """

    def __init__(self, folder: Path, clock: Clock = CLOCK) -> None:
        self._folder = folder
        self._clock = clock
        self.lock = threading.Lock()
        self.share_read = 1.0
        self._tails: dict[str, Tail] = {}
        self._lane_names: dict[str, dict[int, str]] = {}
        self._processes: dict[str, ProcessTrace] = {}
        self._sizes: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(_Event)
        self.names = Names()

    def has_grown(self) -> bool:
        """Return whether the sizes of the files have changed since the previous call."""
        before, self._sizes = self._sizes, {path: path.stat().st_size for path in self._files()}
        return before != self._sizes

    def read(self, patience_s: float = math.inf) -> Mapping[str, ProcessTrace]:
        """Read new lines. Returns the traces by name of the process, in display order.

        Args:
            patience_s: Time after which the rest is left for the next call, in seconds; see `share_read`. Some part of
                each file is always read.
        """
        until = self._clock.now() + patience_s
        read = size = 0
        for path in self._files():
            chunk = self._read(path, until)
            size += chunk.size
            read += chunk.size if chunk.is_last else chunk.read  # the rest of an incomplete line may never come
        self.share_read = read / size if size else 1.0
        return {name: self._processes[name] for name in sorted(self._processes, key=_process_sort_key)}

    def _files(self) -> list[Path]:
        """List the files. Links are excluded, because they may lead out of the run's folder."""
        if self._folder.is_symlink():
            return []
        return sorted(path for path in self._folder.glob("*.jsonl") if path.is_file() and not path.is_symlink())

    def _read(self, path: Path, until: float) -> Chunk:
        """Read new lines of a file until all are read or the time is up. Returns the last chunk."""
        process = path.stem
        tail = self._tails.setdefault(process, Tail(path))
        while True:
            chunk = tail.read()
            if chunk.begins or process not in self._processes:
                self._processes[process], self._lane_names[process] = ProcessTrace(), {}
            if chunk.is_last:
                return chunk
            self._add(process, path, *self._decode(chunk))
            if self._clock.now() >= until:
                return chunk

    def _decode(self, chunk: Chunk) -> tuple[list[_Event], list[int], list[int]]:
        """Decode events, with the offsets and the lengths of their lines."""
        ends = np.flatnonzero(np.frombuffer(chunk.data, np.uint8) == ord("\n"))
        starts = np.concatenate([[0], ends[:-1] + 1])
        try:
            events = self._decoder.decode_lines(chunk.data)
            if len(events) == len(ends):
                return events, (starts + chunk.start).tolist(), (ends - starts).tolist()
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass
        found = [(event, offset, len(line)) for offset, line in chunk.lines if (event := self._event(line)) is not None]
        return [event for event, _, _ in found], [at for _, at, _ in found], [length for _, _, length in found]

    def _event(self, line: bytes) -> _Event | None:
        try:
            return self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # a line that was cut off when a process was killed
            return None

    def _add(self, process: str, path: Path, events: list[_Event], offsets: list[int], lengths: list[int]) -> None:
        trace, lanes = self._processes[process], self._lane_names[process]
        kept: dict[str, list[int]] = {"X": [], "C": []}
        for index, event in enumerate(events):
            if event.ph in kept:
                kept[event.ph].append(index)
            elif event.ph == "M" and event.name == "thread_name" and event.args is not None:
                lanes[event.tid] = str(event.args.name)
            elif event.ph == "M" and event.name == "process_name" and event.args is not None:
                trace.host = str(event.args.host or "")
        for phase, into in ("X", trace.lanes), ("C", trace.counters):
            indices = kept[phase]
            chosen = [events[index] for index in indices]
            spans = self._columns(chosen, [offsets[index] for index in indices], [lengths[index] for index in indices])
            positions: defaultdict[str, list[int]] = defaultdict(list)
            for position, event in enumerate(chosen):
                name = lanes.get(event.tid, str(event.tid)) if phase == "X" else event.name
                positions[name].append(position)
            for name, part in positions.items():
                if name not in into:
                    into[name] = Lane(path, self.names)
                into[name].add(spans[part])

    def _columns(self, events: list[_Event], offsets: list[int], lengths: list[int]) -> np.ndarray[Any, Any]:
        spans = np.zeros(len(events), SPAN)
        spans["start"] = [event.ts for event in events]
        spans["end"] = [event.ts + event.dur for event in events]
        spans["offset"], spans["length"] = offsets, lengths
        spans["name"] = self.names.indices(event.name for event in events)
        spans["kind"] = self.names.indices(event.cat for event in events)
        args = [event.args or _NO_ARGS for event in events]
        spans["step"] = [_number(one.step) for one in args]
        spans["version"] = [_number(one.version) for one in args]
        spans["goes_on"] = [one.goes_on is True for one in args]
        return spans


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < _LARGEST else -1


def _process_sort_key(name: str) -> tuple[int, str, int]:
    return sort_key(name.replace("-rank", " "), _PROCESSES)
