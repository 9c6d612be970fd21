"""Folder of one run. Its files are an interface: reports, notebooks and people read them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.config.load import dump_config
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import CheckpointError, ConfigError
from titan_rl.core.files import last_lines, read_json
from titan_rl.run.journal.state import JournalState, RunState, ranges, train_index
from titan_rl.run.json_lines import JsonLines, cut_records, cut_traces, records

LONGEST = 80
SAYS_NOTHING = ("run_dir", "share_run_dir", "name", "logging.", "pythonpath", "hosts.")
"""Settings, or beginnings of their names, that are no difference between two runs."""


def run_name(config: RunConfig, tomls: Sequence[Path] = (), overrides: Sequence[tuple[str, str]] = ()) -> str:
    """Name of a run: the config's own; else the task, the names of further files, and the settings of the command line.

    Example: `AlphabetSort` from `cpu.toml` and `long.toml` with `--training.lr 1e-3` is "alphabet-sort-long-lr=1e-3".

    Returns:
        part of a file's name: letters, digits and `-_.+=`, 80 at most.
    """
    if config.name:
        return config.name
    settings = {key: value for key, value in overrides if not key.startswith(SAYS_NOTHING)}
    parts = [
        "-".join(source.name.replace("_", "-") for source in config.tasks),
        *(toml.stem for toml in tomls[1:]),
        *(f"{_plain(key.rpartition('.')[2])}={_plain(Path(value).name)}" for key, value in settings.items()),
    ]
    plain = map(_plain, parts)
    name = next(plain)[:LONGEST]
    for part in filter(None, plain):
        if len(name) + 1 + len(part) <= LONGEST:
            name = f"{name}-{part}"
    return name or "run"


def _plain(text: str) -> str:
    return re.sub(r"[^\w.+=-]+", "_", text, flags=re.ASCII).strip("_")


class _Metrics(msgspec.Struct, gc=False):
    step: float


class _Rollout(msgspec.Struct, gc=False):
    step: float
    phase: str = ""
    dropped: str | msgspec.UnsetType | None = msgspec.UNSET
    group_id: str = ""


def check_run_dir(config: RunConfig) -> None:
    """Check that a run's folder can be made, and leave nothing behind.

    Raises:
        ConfigError: it could not.
    """
    path = Path(config.run_dir).absolute()
    try:
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"run_dir = {config.run_dir!r}: no run can be made there: {error.strerror}; name a folder that you may "
            "write to, on a disk with room"
        ) from None


class RunDirectory:
    """Paths of a run's files, and the one writer of its JSON lines.

        config.toml      the resolved settings, defaults included
        metrics.jsonl    {"step": 3, "time_s": 12.5, "rollout/reward_mean": 0.41, ...}, one line a record
        rollouts.jsonl   {"step": 3, "phase": "train", "messages": [...], "reward": 0.74, ...}, one line a rollout
        status.json      whether the run goes on, or how it ended, and what it waits for
        hosts.json       which hosts it has and had, of a run with processes; hosts.jsonl is how others ask for more
        logs/            one file a process
        trace/           what each process does when: one file of Chrome trace events a process
        checkpoints/     one folder a saved step
        run_state.json   the settings and the data position that the run began with, as checkpoints have theirs
        journal/         what happened since, one file a checkpoint
        supervised.json  of a run of `titan-rl sft` alone: which demonstrations it learns
        export/          the policy as a Hugging Face folder
        report.html      what `titan-rl view` shows, as one file
        lock             held while a process runs this run

    Args:
        path: the folder of a run; it is made, with `logs` and `checkpoints`, where it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()  # an environment may change the current folder
        self._started = time.monotonic()
        self._lines = {path: JsonLines(path) for path in (self.metrics, self.rollouts)}
        self.logs.mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)

    @classmethod
    def create(cls, config: RunConfig, name: str | None = None) -> RunDirectory:
        """Make a folder that no other run has, `<config.run_dir>/<date>-<time>-<name>`, and write the settings to it.

        `<config.run_dir>/latest` links to it, where the file system has links.

        Args:
            name: by default that of `run_name`.

        Raises:
            ConfigError: it cannot be made.
        """
        parent = Path(config.run_dir)
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name or run_name(config)}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path = _make_unique(parent, stem)
            run_dir = cls(path)
            run_dir.write_config(config)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"run_dir = {config.run_dir!r} is no folder: {error.filename} is a file; name a folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"run_dir = {config.run_dir!r}: no run can be made there, {error.filename}: {error.strerror}; name a "
                "folder that you may write to, on a disk with room"
            ) from None
        _link(parent / "latest", path.name)
        return run_dir

    def become_latest(self) -> None:
        """Point an existing link `latest` beside the folder to this run."""
        link = self.path.with_name("latest")
        if link.is_symlink():
            _link(link, self.path.name)

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Hold the run's lock for the length of the block, so that no other process runs it.

        Raises:
            CheckpointError: one does, or the lock cannot be opened.
        """
        lock = self.path / "lock"
        try:
            # Not truncated, nor through a link: what is there need not be a lock.
            file = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "rb+")
        except OSError as error:
            raise CheckpointError(
                f"{lock} cannot be opened: {error.strerror}; it must be a file that you may write to, and no link"
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"{self.path} is being run by another process; stop that one first") from None
            yield

    def write_config(self, config: RunConfig) -> None:
        """Replace the settings, in one step."""
        fresh = self.config.with_suffix(".tmp")
        fresh.write_text(dump_config(config), encoding="utf-8")
        fresh.replace(self.config)

    def lost_records(self, step: int, *, transcripts: bool) -> list[str]:
        """Messages about lines of metrics and transcripts that cannot be read, and about steps from 1 to `step` without
        lines.

        Args:
            transcripts: each step should have some.
        """
        complaints: list[str] = []
        for path, kind in ((self.metrics, _Metrics), (self.rollouts, _Rollout)):
            broken, steps = 0, set[float]()
            for record in records(path, kind):
                if record is None:
                    broken += 1
                elif isinstance(record, _Metrics) or record.phase == "train":
                    steps.add(record.step)
            if broken:
                lines = "1 line that cannot be read is" if broken == 1 else f"{broken} lines that cannot be read are"
                complaints.append(f"{path}: {lines} left out")
            missing = [number for number in range(1, step + 1) if number not in steps]
            if missing and (transcripts or path == self.metrics):
                complaints.append(f"{path} has nothing of steps {ranges(missing)}: those lines are lost")
        return complaints

    def cut_records(self, step: int, journal: JournalState) -> None:
        """Remove the metrics and transcripts of steps after `step`, which are run again. A dropped training group that
        is settled stays, whichever step it was dropped in.

        Args:
            journal: knows which groups are settled.
        """

        def stays(rollout: _Rollout) -> bool:
            if rollout.phase == "train" and rollout.dropped is not msgspec.UNSET:
                return journal.is_settled(train_index(rollout.group_id))
            return rollout.step <= step

        cut_records(self.metrics, _Metrics, lambda metrics: metrics.step <= step)
        cut_records(self.rollouts, _Rollout, stays)
        cut_traces(self.trace, step)

    @property
    def run_id(self) -> str:
        """Name of the run in what its processes share."""
        return self.path.name

    @property
    def model(self) -> Mapping[str, str]:
        """The `model_identity` that the run began with; empty where that is not known."""
        with contextlib.suppress(CheckpointError):
            return RunState.read(self.path).model
        return {}

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def trace(self) -> Path:
        return self.path / "trace"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def supervised(self) -> Path:
        """File of runs of `titan-rl sft`."""
        return self.path / "supervised.json"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one record, with `elapsed_s` as `time_s`. NaN and infinities become null.

        Raises:
            OSError: it could not be written.
        """
        self._lines[self.metrics].append({"step": step, "time_s": round(self.elapsed_s, 3), **metrics})

    def write_rollout(self, record: Mapping[str, Any]) -> None:
        """Append one transcript.

        Raises:
            OSError: it could not be written.
        """
        self._lines[self.rollouts].append(record)

    def metric(self, step: int, name: str) -> float | None:
        """Value of a metric in the records of a step; None if there is none."""
        named = json.dumps(name).encode()
        with contextlib.suppress(FileNotFoundError), self.metrics.open("rb") as file:
            for line in file:
                if named in line and (record := read_json(line)) is not None and record.get("step") == step:
                    value = record.get(name)
                    if isinstance(value, int | float):
                        return float(value)
        return None

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has taken, in earlier processes up to their last record."""
        return self._elapsed_before_s + time.monotonic() - self._started

    @cached_property
    def _elapsed_before_s(self) -> float:
        records = (read_json(line) for line in last_lines(self.metrics))
        times = ((record or {}).get("time_s") for record in records)
        return next((float(seconds) for seconds in times if isinstance(seconds, int | float)), 0.0)

    def close(self) -> None:
        """Close the files. A later write opens them again."""
        for lines in self._lines.values():
            lines.close()


_FILES = {
    *("config.toml", "metrics.jsonl", "rollouts.jsonl", "status.json", "hosts.json", "hosts.jsonl", "run_state.json"),
    *("supervised.json", "report.html", "lock"),
}
_FOLDERS = {"logs", "trace", "checkpoints", "journal", "export", "start"}


def check_files(folder: Path | os.DirEntry[str], *, below: bool = False) -> None:
    """Check that what a run's folder has is its own: regular files and folders, and no links, through which a run that
    goes on would write elsewhere. Folders that no run has, of a task for instance, are not looked into.

    Args:
        below: the folder is within a run's.

    Raises:
        ConfigError: names the first entry that is something else, and the fix.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise ConfigError(f"{os.fspath(folder)} cannot be read: {error.strerror}; a run needs to") from None
    for entry in entries:
        if entry.is_symlink():
            raise ConfigError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, and a run follows none in its folder; put what "
                "it leads to in its place, or remove it"
            )
        if not below and entry.name in _FILES and not entry.is_file():
            raise ConfigError(f"{entry.path} must be a file; remove it, or give it another name")
        if not below and entry.name in _FOLDERS and not entry.is_dir():
            raise ConfigError(f"{entry.path} must be a folder; remove it, or give it another name")
        if below and not (entry.is_file() or entry.is_dir()):  # a pipe never ends
            raise ConfigError(f"{entry.path} is neither a file nor a folder; remove it")
        if entry.is_dir() and (below or entry.name in _FOLDERS):
            check_files(entry, below=True)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """See `each_of`."""
    return list(each_of(path))


def each_of(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a file; none if it does not exist. Lines that are no JSON object are skipped: a full
    disk or a killed process may have cut one short."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):
                record = parse_json(line)
                if isinstance(record, dict):
                    yield record  # pyright: ignore[reportUnknownVariableType]


def _make_unique(parent: Path, stem: str) -> Path:
    number = 1
    while True:
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
        number += 1


def _link(link: Path, target: str) -> None:
    """Point `link` to `target` in one step, so that it exists at every moment."""
    fresh = link.with_name(f".{link.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        fresh.symlink_to(target, target_is_directory=True)
        fresh.replace(link)
