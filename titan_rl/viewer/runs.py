"""Readers of runs. Each follows the files of one run's folder as they grow, and answers questions about it."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_rl.core.errors import ConfigError
from titan_rl.core.files import Tail, file_status, open_file, read_json, strict_json
from titan_rl.core.run_files import ADAPTERS, HOSTS
from titan_rl.metrics.bottleneck import bottleneck_of, parts_of
from titan_rl.viewer.metric_columns import Curve, MetricColumns
from titan_rl.viewer.rollout_index import RolloutIndex, RolloutQuery
from titan_rl.viewer.summary import describe_run, summarize
from titan_rl.viewer.trace import Traces
from titan_rl.viewer.warning_signs import WarningSigns

PATIENCE_S = 0.5
"""Time for which an answer about rollouts waits for indexing, in seconds."""

LOOK_PATIENCE_S = 2.0
INDEXED_AT_ONCE = 1 << 20
_READ = ("status.json", "config.toml", "metrics.jsonl", "rollouts.jsonl", "results.json", "trace")
_PAUSE_S = 0.001  # between two chunks of a large file, so that other threads can answer


class RunReader:
    """Metrics and rollouts of a run, read as far as they are written. Thread-safe.

    Args:
        folder: Folder of a run or an evaluation. `traces` reads the spans of its processes.
        searches: Whether the text of rollouts can be searched; see `RolloutIndex`.
    """

    def __init__(self, folder: Path, *, searches: bool = True) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._metrics_tail = Tail(folder / "metrics.jsonl")
        self._rollouts_tail = Tail(folder / "rollouts.jsonl")
        self._columns = MetricColumns()
        self._parts: defaultdict[str, float] = defaultdict(float)  # parts of the steps' time, see `parts_of`
        self.traces = Traces(folder / "trace")
        self._signs = WarningSigns()
        self._warnings: list[str] = []
        self._num_broken = 0  # unreadable lines of metrics
        self._index = RolloutIndex(keeps_text=searches)
        self._indexed = 1.0
        self._changes = {"metrics": 0, "rollouts": 0, "timeline": 0}
        self._hosts_at = self._written_at(HOSTS)

    def close(self) -> None:
        with self._lock:
            self._index.close()

    def look(self) -> dict[str, int]:
        """Read new content. Returns for "metrics", "rollouts" and "timeline" a number that changes whenever the files
        do."""
        if self._metrics_tail.has_changed():
            with self._lock:
                self._read_metrics()
        if self._rollouts_tail.has_changed():
            self._read_rollouts(LOOK_PATIENCE_S)
        before, self._hosts_at = self._hosts_at, self._written_at(HOSTS)
        self._changes["metrics"] += before != self._hosts_at  # hosts are reported together with metrics
        with self.traces.lock:
            self._changes["timeline"] += self.traces.has_grown()
        return dict(self._changes)

    def columns(self) -> MetricColumns:
        """Return all metrics so far."""
        with self._lock:
            self._read_metrics()
            return self._columns

    def summary(self) -> dict[str, Any]:
        """Return the result of `summarize`, and time: the parts of the steps' time, [{"name", "seconds", "share"}],
        with shares that add up to 1; and bottleneck: {"name", "share", "sentence"} of the largest part, or None if no
        metrics show it."""
        with self._lock:
            self._read_metrics()
            warnings = list(self._warnings)
            for name, count in {"metrics": self._num_broken, "rollouts": self._index.num_broken}.items():
                if count:
                    lines = "line cannot be read, and is" if count == 1 else "lines cannot be read, and are"
                    warnings.append(f"{count} {lines} left out of {name}.jsonl")
            warnings += [
                f"{name} is a symlink, which is not followed; replace it with its target"
                for name in _READ
                if (self.folder / name).is_symlink()
            ]
            total = math.fsum(self._parts.values())
            return {
                **summarize(self.folder, self._columns, warnings),
                "bottleneck": None if (found := bottleneck_of(self._parts)) is None else asdict(found),
                "time": [
                    {"name": name, "seconds": seconds, "share": seconds / total}
                    for name, seconds in sorted(self._parts.items(), key=lambda part: -part[1])
                    if seconds
                ],
            }

    def curves(self, names: Sequence[str], points: int, first: float, last: float) -> dict[str, Curve]:
        """Return the curves of those metrics that the run has; see `MetricColumns.curve`."""
        with self._lock:
            self._read_metrics()
            return {
                name: self._columns.curve(name, points=points, first=first, last=last)
                for name in names
                if name in self._columns
            }

    def rollouts(self, query: RolloutQuery) -> dict[str, Any]:
        """Return the result of `RolloutIndex.find`, with `indexed`: the share of the file that is indexed, in [0,
        1]."""
        self._read_rollouts(PATIENCE_S)
        with self._lock:
            return {**self._index.find(query), "indexed": self._indexed}

    def prompts(self) -> dict[str, Any]:
        """Return the result of `RolloutIndex.prompts`."""
        self._read_rollouts(PATIENCE_S)
        with self._lock:
            return self._index.prompts()

    def count_groups(self, patience_s: float) -> tuple[dict[str, int], float]:
        """Return the result of `RolloutIndex.count_groups`, and the share of the file that is indexed, in [0, 1]."""
        self._read_rollouts(patience_s)
        with self._lock:
            return self._index.count_groups(), self._indexed

    def group(self, phase: str, group_index: int) -> list[int]:
        """Return the indices of a group's rollouts; see `RolloutIndex.group`."""
        with self._lock:
            return self._index.group(phase, group_index)

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts indexed so far."""
        return len(self._index)

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows of rollouts; see `RolloutIndex.rows`."""
        with self._lock:
            return self._index.rows(indices)

    def rollout(self, index: int) -> bytes | None:
        """Return a line of `rollouts.jsonl` in the form of `strict_json`; None if there is no rollout with this
        index."""
        if index >= len(self._index):
            self._read_rollouts(PATIENCE_S)
        with self._lock:
            byte_range = self._index.byte_range(index)
            if byte_range is None:
                return None
            offset, length = byte_range
            try:
                with open_file(self.folder / "rollouts.jsonl") as file:
                    file.seek(offset)
                    return strict_json(file.read(length))
            except (OSError, ValueError):  # the file has been replaced since it was indexed
                return None

    def _written_at(self, name: str) -> int:
        try:
            return file_status(self.folder / name).st_mtime_ns
        except OSError:
            return 0

    def _read_metrics(self) -> None:
        while True:
            chunk = self._metrics_tail.read()
            if chunk.begins:
                self._columns, self._signs, self._warnings = MetricColumns(), WarningSigns(), []
                self._parts.clear()
                self._num_broken = 0
            self._changes["metrics"] += chunk.begins or bool(chunk.data)
            self._num_broken += chunk.num_skipped
            if chunk.is_last:
                return
            for _, line in chunk.lines:
                record = read_json(line)
                if record is None:
                    self._num_broken += bool(line.strip())
                    continue
                self._columns.add(record)
                for name, seconds in parts_of(record).items():
                    self._parts[name] += seconds
                warnings = self._signs.look(record)
                self._warnings += [f"step {record.get('step')}: {text}" for text in warnings]

    def _read_rollouts(self, patience_s: float) -> None:
        """Index new lines until all are indexed or the time is up. Other threads can take the lock between chunks."""
        until = time.monotonic() + patience_s
        while True:
            with self._lock:
                chunk = self._rollouts_tail.read(INDEXED_AT_ONCE)
                if chunk.begins:
                    self._index.clear()
                self._changes["rollouts"] += chunk.begins or bool(chunk.data)
                self._index.num_broken += chunk.num_skipped
                self._index.add(chunk.lines)
                self._indexed = chunk.read / chunk.size if chunk.size else 1.0
            if chunk.is_last or time.monotonic() >= until:
                return
            time.sleep(_PAUSE_S)


_MARKS = ("status.json", "metrics.jsonl", "rollouts.jsonl", "results.json")
_DEPTH = 3  # runs/evaluations/<date>-<name>/<policy>


class Runs:
    """Runs in some folders, including runs that start later. The id of a run is its folder's name, or the path if
    several folders have that name.

    Args:
        given: Folders of runs, or folders that contain such folders.

    Raises:
        ConfigError: One of them is not a folder.
    """

    def __init__(self, given: Sequence[Path]) -> None:
        for path in given:
            if not path.is_dir():
                raise ConfigError(
                    f"{path} is not a folder; name the folder of a run, such as runs/latest, or a folder of runs"
                )
        self._given = [path.resolve() for path in given]
        self._readers: dict[str, RunReader] = {}

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def folders(self) -> dict[str, Path]:
        """Return the folders of runs by id, newest first."""
        found = list(dict.fromkeys(folder for path in self._given for folder in find_runs(path)))
        found.sort(key=lambda folder: (folder.name, str(folder)), reverse=True)
        named = Counter(folder.name for folder in found)
        ids = {
            folder.name if named[folder.name] == 1 else str(folder).strip("/").replace("/", "~"): folder
            for folder in found
        }
        return {each: path for run, folder in ids.items() for each, path in with_adapters(run, folder).items()}

    def describe(self) -> list[dict[str, Any]]:
        """Make the answer to /api/runs."""
        return describe_runs(self.folders(), self._given)

    def reader(self, run: str) -> RunReader | None:
        """Return the reader of a run; None if there is no such run."""
        folder = self.folders().get(run)
        if folder is None:
            return None
        reader = self._readers.get(run)
        if reader is None or reader.folder != folder:
            reader = self._readers[run] = RunReader(folder)
        return reader

    def look(self) -> dict[str, dict[str, int]]:
        """Return the results of `RunReader.look` by id, for runs that a client has opened. The empty id has "runs"."""
        described = json.dumps([(one["id"], one["state"], one["steps"]) for one in self.describe()])
        found = {run: reader.look() for run, reader in list(self._readers.items())}
        return {"": {"runs": zlib.crc32(described.encode())}, **found}


def with_adapters(run: str, folder: Path) -> dict[str, Path]:
    """Return the folders of a run and of its adapters by id; an adapter's is "RUN~NAME"."""
    adapters = sorted(path for path in folder.glob(f"{ADAPTERS}/*") if not path.is_symlink() and is_run(path))
    return {run: folder} | {f"{run}~{path.name}": path for path in adapters}


def describe_runs(folders: Mapping[str, Path], named: Collection[Path]) -> list[dict[str, Any]]:
    """Make the entries of runs; see `describe_run`. Each also has "id", "named", whether the user has named it, and
    "parent", the id of the run whose adapter it is, or None."""
    ids = {folder: run for run, folder in folders.items()}
    entries: list[dict[str, Any]] = []
    for run, folder in folders.items():
        entry = {"id": run, **describe_run(folder), "named": folder in named, "parent": None}
        above = folder.parents[1]
        if folder.parent.name == ADAPTERS and above in ids:
            entry |= {"parent": ids[above], "name": f"{above.name}/{folder.name}"}
        entries.append(entry)
    return entries


def is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / mark) for mark in _MARKS)


def find_runs(folder: Path, depth: int = _DEPTH) -> list[Path]:
    """Find the folders of runs in a folder, which may be one itself. Links such as `latest` are left out."""
    if is_run(folder):
        return [folder]
    if not depth:
        return []
    try:
        inside = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [found for path in inside for found in find_runs(Path(path), depth - 1)]
