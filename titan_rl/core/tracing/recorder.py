"""Recorder of one process's trace events, which a separate thread writes in batches."""

from __future__ import annotations

import errno
import heapq
import json
import logging
import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from titan_rl.core.console import Console
from titan_rl.core.files import is_same_file

FINE = b'{"cat":"fine'
"""Prefix of the lines of spans within a rollout. There are many, and the oldest of them are dropped first."""
NAMES = b'{"ph":"M"'
"""Prefix of lines that name a process or a lane. They are never dropped."""


class TraceFile:
    """File of JSON lines, which contains complete lines only.

    Args:
        path: Path of the file.
        most_bytes: Largest size of the file. A larger file is shrunk to three quarters of this size. Fine spans keep at
            most half of that, and the oldest spans of each kind are dropped first.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._file: BinaryIO | None = None

    def append(self, lines: Iterable[bytes]) -> None:
        """Append lines to the file.

        Raises:
            OSError: the lines could not be written. The file is unchanged.
        """
        data = b"".join(lines)
        file = self._open()
        size = os.fstat(file.fileno()).st_size
        if file.write(data) != len(data):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        if size + len(data) > self._most_bytes:
            self._shrink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        if self._file is not None and not is_same_file(self._file, self._path):
            self.close()  # a new file begins
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            self._end_last_line(self._file)
        return self._file

    def _end_last_line(self, file: BinaryIO) -> None:
        """End a partial line, which a killed process may have left."""
        if size := os.fstat(file.fileno()).st_size:
            with self._path.open("rb") as old:
                old.seek(size - 1)
                if old.read() != b"\n":
                    file.write(b"\n")

    def _shrink(self) -> None:
        """Replace the file atomically by one of at most three quarters of the allowed size.

        The lines are read one by one: a list of all lines would take several times the file's size in memory, which
        would stay fragmented for the lifetime of the process.
        """
        self.close()
        sizes = {FINE: 0, NAMES: 0, b"": 0}
        with self._path.open("rb") as old:
            for line in old:
                sizes[_kind(line)] += len(line)
        room = self._most_bytes * 3 // 4
        excess = {FINE: sizes[FINE] - room // 2}
        excess[b""] = sizes[b""] - (room - min(sizes[FINE], room // 2))
        fresh = self._path.with_suffix(".tmp")
        with self._path.open("rb") as old, fresh.open("wb") as new:
            for line in old:
                kind = _kind(line)
                if excess.get(kind, 0) > 0:
                    excess[kind] -= len(line)
                else:
                    new.write(line)
        fresh.replace(self._path)


def _kind(line: bytes) -> bytes:
    """The prefix that determines whether a line is kept or dropped."""
    return next((prefix for prefix in (FINE, NAMES) if line.startswith(prefix)), b"")


logger = logging.getLogger(__name__)

FLUSH_S = 0.5
PART_S = 2.0
"""Longer spans are written in parts, so that the trace of a running or killed process shows them."""
GOES_ON = "goes_on"
"""Key in the args of a part of a span that another part follows."""
ONE_CLOCK_S = 60.0
"""Difference of the clocks' offsets from which on two processes are taken to have different monotonic clocks, as a
container may have. Corrections of the time of day are usually smaller."""
MOST_WAITING = 200_000
"""Largest number of events that wait to be written. If the disk is too slow, the oldest are lost."""
MOST_BEGINNINGS = 10_000
"""Largest number of encoded beginnings of lines in the cache."""

_ENDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Tracing:
    """Trace settings that the processes of a run share. They can be pickled.

    Args:
        folder: Folder of the trace files, one for each process.
        most_bytes: Largest size of a file.
        boot: Boot id of the machine to whose monotonic clock `offset_ns` belongs.
        offset_ns: Difference between the time since 1970 and the monotonic clock of that machine, in nanoseconds.
        remote_offset_ns: Difference between the time since 1970 and the monotonic clock of another host, for the
            processes that record there. None if that clock was not compared with this machine's.
    """

    folder: str
    most_bytes: int
    boot: str
    offset_ns: int
    remote_offset_ns: int | None = None

    @classmethod
    def begin(cls, folder: Path, most_bytes: int) -> Tracing:
        """Settings for the process that starts the others. All processes of a machine share its monotonic clock."""
        return cls(str(folder), most_bytes, _boot(), _offset_ns())

    def on_host(self, ahead_ns: int) -> Tracing:
        """The same settings for a host whose monotonic clock is `ahead_ns` ahead of this machine's. Its events are
        recorded in this machine's time."""
        return replace(self, remote_offset_ns=self.offset_ns - ahead_ns)


class OpenSpan:
    """A span that has not ended.

    Attributes:
        written_ns: Time up to which the span is written, by `time.monotonic_ns`.
        within: Surrounding span.
        cut_ns: Time at which a surrounding span of another task ended, and this one in its lane, too.
    """

    __slots__ = ("args", "cut_ns", "fine", "kind", "name", "within", "written_ns")

    def __init__(self, name: str, kind: str, fine: bool, args: dict[str, Any]) -> None:
        self.name, self.kind, self.fine, self.args = name, kind, fine, args
        self.written_ns = 0
        self.within: OpenSpan | None = None
        self.cut_ns: int | None = None


class OpenLane:
    """One lane of a timeline, for as long as a span is open in it.

    Attributes:
        name: Name of the pool, followed by the number unless that is 1.
        top: Innermost open span.
    """

    __slots__ = ("name", "number", "pool", "recorder", "top")

    def __init__(self, recorder: TraceRecorder, pool: str, number: int) -> None:
        self.recorder, self.pool, self.number = recorder, pool, number
        self.name = pool if number == 1 else f"{pool} {number}"
        self.top: OpenSpan | None = None

    def open_spans(self) -> Iterator[OpenSpan]:
        """Iterate over the open spans, the innermost first."""
        span = self.top
        while span is not None:
            yield span
            span = span.within

    def cut_above(self, span: OpenSpan, now_ns: int) -> None:
        """End the spans of other tasks that are open within `span`."""
        while (inner := self.top) is not None and inner is not span:
            inner.cut_ns = now_ns
            self.top = inner.within

    def give_back(self) -> None:
        self.recorder.give_back(self)


class TraceRecorder:
    """Recorder of the events of all threads of one process.

    Args:
        tracing: Trace settings of the run.
        process: Name of the process and of its file.
        console: Shows why the trace ends early, which is also logged. A failure to write never ends the run.
        host: Host of the process; by default the name of this machine.
    """

    def __init__(self, tracing: Tracing, process: str, console: Console | None = None, host: str = "") -> None:
        self.tracing = tracing
        own = _offset_ns()
        is_same_clock = tracing.boot == _boot() and abs(own - tracing.offset_ns) < ONE_CLOCK_S * 1e9
        remote_offset_ns = own if tracing.remote_offset_ns is None else tracing.remote_offset_ns
        self._offset_ns = tracing.offset_ns if is_same_clock else remote_offset_ns
        self._process = process
        self._pid = _number(process)
        self._console = console
        self._path = Path(tracing.folder) / f"{process}.jsonl"
        self._file = TraceFile(self._path, tracing.most_bytes)
        self._events: deque[tuple[Any, ...]] = deque(maxlen=MOST_WAITING)
        self._numbering = threading.Lock()
        self._free_numbers: defaultdict[str, list[int]] = defaultdict(list)  # by pool
        self._num_lanes: defaultdict[str, int] = defaultdict(int)  # by pool, including lanes that were given back
        self._taken: set[OpenLane] = set()
        self._ending = threading.Lock()
        self._beginnings: dict[tuple[str, str, str, str], str] = {}
        self._failed = False
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._add("M", "process_name", "", "", 0, 0, {"name": process, "host": host or socket.gethostname()})
        self._thread.start()

    def take_lane(self, pool: str) -> OpenLane:
        """Take the lane of a pool with the smallest free number. Until it is given back, its long spans are written in
        parts while they are open."""
        with self._numbering:
            is_new = not self._free_numbers[pool]
            if is_new:
                self._num_lanes[pool] += 1
            number = self._num_lanes[pool] if is_new else heapq.heappop(self._free_numbers[pool])
        lane = OpenLane(self, pool, number)
        if is_new:
            self._add("M", "thread_name", "", lane.name, 0, 0, {"name": lane.name})
        self._taken.add(lane)
        return lane

    def give_back(self, lane: OpenLane) -> None:
        self._taken.discard(lane)
        with self._numbering:
            heapq.heappush(self._free_numbers[lane.pool], lane.number)

    def end(self, span: OpenSpan, lane: OpenLane, end_ns: int) -> None:
        """Record a span that ends at `end_ns`, by `time.monotonic_ns`."""
        with self._ending:
            self._add_span(span, lane, max(end_ns, span.written_ns), span.args)
            span.written_ns = _ENDED

    def count(self, name: str, kind: str, values: Mapping[str, float]) -> None:
        """Record the values of a counter from now on."""
        now = time.monotonic_ns()
        self._add("C", name, kind, "", now, now, values)

    def flush(self) -> None:
        """Write all waiting events. Thread-safe."""
        with self._writing:
            events: list[bytes] = []
            while self._events:
                events.append(self._line(*self._events.popleft()))
            if not events or self._failed:
                return
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file.append(events)
            except OSError as error:
                self._failed = True
                reason = f"the trace of {self._process} ends here, and the run continues without it: {error}"
                logger.warning("%s", reason)
                if self._console is not None:
                    self._console.message(reason)

    def close(self) -> None:
        """Write the remaining events and the parts of open spans so far, and close the file."""
        self._ended.set()
        self._thread.join(10.0)
        self.add_parts(0.0)
        self.flush()
        with self._writing:
            self._file.close()

    def add_parts(self, least_s: float) -> None:
        """Write a part of each open span that was not written for `least_s`."""
        now_ns = time.monotonic_ns()
        for lane in [*self._taken]:
            for span in lane.open_spans():
                if now_ns - span.written_ns >= least_s * 1e9:
                    self._end_part(span, lane, now_ns)

    def _end_part(self, span: OpenSpan, lane: OpenLane, now_ns: int) -> None:
        with self._ending:
            if span.written_ns < now_ns:  # false if the span has ended in the meantime
                self._add_span(span, lane, now_ns, {**span.args, GOES_ON: True})
                span.written_ns = now_ns

    def _run(self) -> None:
        while not self._ended.wait(FLUSH_S):
            self.add_parts(PART_S)
            self.flush()

    def _add_span(self, span: OpenSpan, lane: OpenLane, end_ns: int, args: Mapping[str, Any]) -> None:
        self._add("f" if span.fine else "X", span.name, span.kind, lane.name, span.written_ns, end_ns, args)

    def _add(self, *event: Any) -> None:
        """Add an event, which `_line` encodes."""
        self._events.append(event)

    def _line(
        self, ph: str, name: str, kind: str, lane: str, begin_ns: int, end_ns: int, args: Mapping[str, Any]
    ) -> bytes:
        if ph == "M":
            line = (
                f'{{"ph":"M","name":{_compact(name)},"pid":{self._pid},"tid":{_number(lane)},"args":{_compact(args)}}}'
            )
            return f"{line}\n".encode()
        begin = self._beginnings.get((ph, name, kind, lane))  # thousands of spans begin alike
        if begin is None:
            begin = f'{{"cat":{_compact(f"fine,{kind}" if ph == "f" else kind)},"ph":"{"C" if ph == "C" else "X"}",'
            begin += f'"name":{_compact(name)},"pid":{self._pid},"tid":{_number(lane)},"ts":'
            if len(self._beginnings) < MOST_BEGINNINGS:
                self._beginnings[ph, name, kind, lane] = begin
        start, end = (begin_ns + self._offset_ns) // 1000, (end_ns + self._offset_ns) // 1000
        duration = "" if ph == "C" else f',"dur":{end - start}'
        return f'{begin}{start}{duration},"args":{_compact(args) if args else "{}"}}}\n'.encode()


_compact = json.JSONEncoder(separators=(",", ":"), default=str).encode


def _number(name: str) -> int:
    """Number of a process or lane, equal in each process that appends to the same file; 0 for an empty name."""
    return crc32(name.encode()) & 0x7FFFFFFF


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _offset_ns() -> int:
    return time.time_ns() - time.monotonic_ns()
