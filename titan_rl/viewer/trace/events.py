"""Reads the traces of a run's processes as they grow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from titan_rl.viewer.tail import Chunk, Tail
from titan_rl.viewer.trace.lanes import SPAN, Lane, Names, ProcessTrace, place_of

_PROCESSES = ("controller", "trainer", "generator", "rollout-worker")
_LARGEST = 2**31
_Microseconds = Annotated[float, msgspec.Meta(ge=-1e17, le=1e17)]  # fits into a column, as does the sum of two


class _Args(msgspec.Struct, gc=False):
    """Of all that a span has to tell, what is asked about the whole run."""

    step: Any = None
    version: Any = None
    name: Any = None
    host: Any = None
    goes_on: Any = None


class _Event(msgspec.Struct, gc=False):
    """A Chrome trace event, times in microseconds since 1970."""

    ph: str
    name: str
    tid: int
    cat: str = ""
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: _Args | None = None


_NO_ARGS = _Args()


class Traces:
    """The traces of one run, of which each line is read once. Not thread-safe.

    Args:
        folder: `trace` of the run's folder.
        clock: seconds.

    Attributes:
        share_read: of the bytes of all files, in [0, 1].
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self.share_read = 1.0
        self._tails: dict[str, Tail] = {}
        self._lane_names: dict[str, dict[int, str]] = {}
        self._processes: dict[str, ProcessTrace] = {}
        self._sizes: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(_Event)
        self.names = Names()

    def has_grown(self) -> bool:
        """Whether files have other sizes than when this was last called."""
        before, self._sizes = self._sizes, {path: path.stat().st_size for path in self._files()}
        return before != self._sizes

    def read(self, patience_s: float = math.inf) -> Mapping[str, ProcessTrace]:
        """By the names of the processes, in the order in which they are shown.

        Args:
            patience_s: after which the rest is left for the next call, see `share_read`. A part of it is read always.
        """
        until = self._clock() + patience_s
        read = size = 0
        for path in self._files():
            chunk = self._read(path, until)
            size += chunk.size
            read += chunk.size if chunk.is_last else chunk.read  # the end of a line may never come
        self.share_read = read / size if size else 1.0
        return {name: self._processes[name] for name in sorted(self._processes, key=_place_of_process)}

    def _files(self) -> list[Path]:
        """Links lead out of the run's folder."""
        if self._folder.is_symlink():
            return []
        return sorted(path for path in self._folder.glob("*.jsonl") if path.is_file() and not path.is_symlink())

    def _read(self, path: Path, until: float) -> Chunk:
        """Read what is new, until all is or the time is up. Returns the last chunk."""
        process = path.stem
        tail = self._tails.setdefault(process, Tail(path))
        while True:
            chunk = tail.read()
            if chunk.begins or process not in self._processes:
                self._processes[process], self._lane_names[process] = ProcessTrace(), {}
            if chunk.is_last:
                return chunk
            self._add(process, path, *self._decode(chunk))
            if self._clock() >= until:
                return chunk

    def _decode(self, chunk: Chunk) -> tuple[list[_Event], list[int], list[int]]:
        """Events with the offsets and the lengths of their lines."""
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
        except (msgspec.MsgspecError, UnicodeDecodeError):  # cut short, when a process was killed
            return None

    def _add(self, process: str, path: Path, events: list[_Event], offsets: list[int], lengths: list[int]) -> None:
        trace, lanes = self._processes[process], self._lane_names[process]
        kept: dict[str, list[int]] = {"X": [], "C": []}
        for place, event in enumerate(events):
            if event.ph in kept:
                kept[event.ph].append(place)
            elif event.ph == "M" and event.name == "thread_name" and event.args is not None:
                lanes[event.tid] = str(event.args.name)
            elif event.ph == "M" and event.name == "process_name" and event.args is not None:
                trace.host = str(event.args.host or "")
        for phase, into in ("X", trace.lanes), ("C", trace.counters):
            places = kept[phase]
            chosen = [events[place] for place in places]
            spans = self._columns(chosen, [offsets[place] for place in places], [lengths[place] for place in places])
            by = [lanes.get(event.tid, str(event.tid)) if phase == "X" else event.name for event in chosen]
            for name, part in _parts(by):
                if name not in into:
                    into[name] = Lane(path, self.names)
                into[name].add(spans[part])

    def _columns(self, events: list[_Event], offsets: list[int], lengths: list[int]) -> np.ndarray[Any, Any]:
        spans = np.zeros(len(events), SPAN)
        spans["start"] = [event.ts for event in events]
        spans["end"] = [event.ts + event.dur for event in events]
        spans["offset"], spans["length"] = offsets, lengths
        spans["name"] = self.names.places(event.name for event in events)
        spans["kind"] = self.names.places(event.cat for event in events)
        args = [event.args or _NO_ARGS for event in events]
        spans["step"] = [_number(one.step) for one in args]
        spans["version"] = [_number(one.version) for one in args]
        spans["goes_on"] = [one.goes_on is True for one in args]
        return spans


def _parts(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Each name with its places."""
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(name, []).append(place)
    return [*found.items()]


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < _LARGEST else -1


def _place_of_process(name: str) -> tuple[int, str, int]:
    return place_of(name.replace("-rank", " "), _PROCESSES)
