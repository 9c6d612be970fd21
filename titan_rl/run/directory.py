"""Folder of one run. Its files are an interface for reports, notebooks and people."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.config.load import dump_config
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.console import Console
from titan_rl.core.errors import CheckpointError, ConfigError
from titan_rl.core.files import last_lines, read_json
from titan_rl.core.run_files import ADAPTERS
from titan_rl.run.journal.state import JournalState, RunState, ranges, train_index
from titan_rl.run.json_lines import JsonLines, cut_records, cut_traces, records

LONGEST = 80
MOST_IN_NAMES = 3
"""Largest number of overrides in a name; the page shows all settings in which runs differ."""
NOT_IN_NAMES = ("run_dir", "share_run_dir", "name", "logging.", "pythonpath", "hosts.")
"""Names of settings, or prefixes of names, that do not distinguish two runs."""


def run_name(config: RunConfig, tomls: Sequence[Path] = (), overrides: Sequence[tuple[str, str]] = ()) -> str:
    """Name a run: by `config.name`, or otherwise by the task or the file of chats, the names of further files, and the
    settings of the command line: the first `MOST_IN_NAMES`, and the number of others.

    Example: `AlphabetSort` from `cpu.toml` and `long.toml` with `--training.lr 1e-3` is "alphabet-sort-long-lr=1e-3".

    Returns:
        A name that can be part of a file name: at most 80 letters, digits and `-_.+=`.
    """
    if config.name:
        return config.name
    settings = {key: value for key, value in overrides if not key.startswith(NOT_IN_NAMES)}
    named, others = [*settings.items()][:MOST_IN_NAMES], len(settings) - MOST_IN_NAMES
    parts = [
        "-".join(source.name.replace("_", "-") for source in config.tasks) or Path(config.sft.data).stem,
        *(toml.stem for toml in tomls[1:]),
        *(f"{_plain(key.rpartition('.')[2])}={_plain(Path(value).name)}" for key, value in named),
        *([f"+{others}"] if others > 0 else []),
    ]
    plain = map(_plain, parts)
    name = next(plain)[:LONGEST]
    for part in filter(None, plain):
        if len(name) + 1 + len(part) <= LONGEST:
            name = f"{name}-{part}"
    return name or "run"


def _plain(text: str) -> str:
    return re.sub(r"[^\w.+=-]+", "_", text, flags=re.ASCII).strip("_")


def adapters_of_run(run: Path) -> dict[str, Path]:
    """Folders of the adapters of a run with [[adapters]], by adapter name; empty for a run of a single policy. The
    folder of an adapter does not exist before its training begins."""
    try:
        tables: Any = tomllib.loads((run / "config.toml").read_text()).get("adapters", ())
        return {str(table["name"]): run / ADAPTERS / str(table["name"]) for table in tables}
    except (OSError, ValueError, LookupError, TypeError):  # loading the settings reports what is wrong with them
        return {}


class _Metrics(msgspec.Struct, gc=False):
    step: float


class _Rollout(msgspec.Struct, gc=False):
    step: float
    phase: str = ""
    dropped: str | msgspec.UnsetType | None = msgspec.UNSET
    group_id: str = ""


def check_run_dir(config: RunConfig) -> None:
    """Check that a run's folder can be created, and leave nothing behind.

    Raises:
        ConfigError: The folder cannot be created.
    """
    path = Path(config.run_dir).absolute()
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            f"run_dir = {config.run_dir!r}: no run can be created there: {error.strerror}; name a folder that you "
            "may write to, on a disk with room"
        ) from None


class RunDirectory:
    """Paths of a run's files, and the only writer of its JSON lines.

        config.toml      the resolved settings, defaults included
        metrics.jsonl    {"step": 3, "time_s": 12.5, "rollout/reward_mean": 0.41, ...}, one line per record
        rollouts.jsonl   {"step": 3, "phase": "train", "messages": [...], "reward": 0.74, ...}, one line per rollout
        status.json      state of the run, its outcome, and what it is waiting for
        hosts.json       current and former hosts of a run with processes; requests for changes arrive in hosts.jsonl
        logs/            one file per process
        trace/           Chrome trace events, one file per process
        checkpoints/     one folder per saved step
        run_state.json   settings and data position at the start of the run; each checkpoint has its own
        journal/         events after each checkpoint, one file per checkpoint
        supervised.json  digest of the demonstrations, in runs of `titan-rl sft`
        export/          the policy as a Hugging Face folder
        report.html      page of `titan-rl view`, as one file
        lock             held while a process executes this run

    Args:
        path: Folder of a run. It is created, with `logs` and `checkpoints`, if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()  # an environment may change the current folder
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts.jsonl"
        self.logs = self.path / "logs"
        self.trace = self.path / "trace"
        self.checkpoints = self.path / "checkpoints"
        self.journal = self.path / "journal"
        self.supervised = self.path / "supervised.json"
        self.export = self.path / "export"
        self.report = self.path / "report.html"
        self._started = time.monotonic()
        self._lines = {path: JsonLines(path) for path in (self.metrics, self.rollouts)}
        self.logs.mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)

    @classmethod
    def create(cls, config: RunConfig, name: str | None = None) -> RunDirectory:
        """Create a new folder, `<config.run_dir>/<date>-<time>-<name>`, and write the settings to it.

        `<config.run_dir>/latest` links to it, if the file system has links.

        Args:
            name: Last part of the folder's name. Defaults to `run_name(config)`.

        Raises:
            ConfigError: The folder cannot be created.
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
                f"run_dir = {config.run_dir!r} is not a folder: {error.filename} is a file; name a folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"run_dir = {config.run_dir!r}: no run can be created there, {error.filename}: {error.strerror}; "
                "name a folder that you may write to, on a disk with room"
            ) from None
        _link(parent / "latest", path.name)
        return run_dir

    def become_latest(self) -> None:
        """Point the link `latest` next to the folder to this run, if the link exists."""
        link = self.path.with_name("latest")
        if link.is_symlink():
            _link(link, self.path.name)

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Hold the run's lock during the block, so that no other process executes the run.

        Raises:
            CheckpointError: Another process is executing the run, or the lock cannot be opened.
        """
        lock = self.path / "lock"
        try:
            # The file is not truncated, nor opened through a link: an existing file need not be a lock.
            file = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "rb+")
        except OSError as error:
            raise CheckpointError(
                f"{lock} cannot be opened: {error.strerror}; it must be a writable file, not a link"
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"{self.path} is being run by another process; stop that one first") from None
            yield

    def write_config(self, config: RunConfig) -> None:
        """Replace the file of the settings atomically."""
        fresh = self.config.with_suffix(".tmp")
        fresh.write_text(dump_config(config), encoding="utf-8")
        fresh.replace(self.config)

    def lost_records(self, step: int, *, transcripts: bool) -> list[str]:
        """Return messages about unreadable lines of metrics and transcripts, and about steps from 1 to `step` without
        lines.

        Args:
            transcripts: Whether each step should have transcripts.
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
                complaints.append(f"{path} has no lines of steps {ranges(missing)}: they are lost")
        return complaints

    def cut_records(self, step: int, journal: JournalState) -> None:
        """Remove the metrics, transcripts and trace events of steps after `step`, which are run again. The transcripts
        of a dropped training group stay if the group is settled, regardless of the step in which it was dropped.

        Args:
            journal: State with the settled groups.
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
        """Name of the run in the names of resources that its processes share."""
        return self.path.name

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Identity of everything that the run reads, see `inputs_of`; empty if unknown."""
        with contextlib.suppress(CheckpointError):
            return RunState.read(self.path).inputs
        return {}

    @property
    def models(self) -> Mapping[str, Mapping[str, str]]:
        """Identity of each model that the run reads, by setting; empty if unknown."""
        return self.inputs.get("models", {})

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one record of metrics, with `elapsed_s` as `time_s`. NaN and infinities become null.

        Raises:
            OSError: The record could not be written, or waits for room on the disk; see `JsonLines.append`.
        """
        self._lines[self.metrics].append({"step": step, "time_s": round(self.elapsed_s, 3), **metrics})

    def write_rollout(self, record: Mapping[str, Any]) -> None:
        """Append one transcript.

        Raises:
            OSError: See `write_metrics`.
        """
        self._lines[self.rollouts].append(record)

    def metric(self, step: int, name: str) -> float | None:
        """Read the value of a metric in the records of a step; None if there is none."""
        named = json.dumps(name).encode()
        with contextlib.suppress(FileNotFoundError), self.metrics.open("rb") as file:
            for line in file:
                if named in line and (record := read_json(line)) is not None and record.get("step") == step:
                    value = record.get(name)
                    if isinstance(value, int | float):
                        return float(value)
        return None

    def last_metric(self, name: str) -> float | None:
        """Read the newest value of a metric; None if there is none."""
        values = ((read_json(line) or {}).get(name) for line in last_lines(self.metrics))
        return next((float(value) for value in values if isinstance(value, int | float)), None)

    @property
    def elapsed_s(self) -> float:
        """Duration of the run in seconds. For earlier processes of the run, the time up to their last record counts."""
        return self._elapsed_before_s + time.monotonic() - self._started

    @cached_property
    def _elapsed_before_s(self) -> float:
        records = (read_json(line) for line in last_lines(self.metrics))
        times = ((record or {}).get("time_s") for record in records)
        return next((float(seconds) for seconds in times if isinstance(seconds, int | float)), 0.0)

    def show_on(self, console: Console) -> None:
        """Show on a console that a file was removed, or that records were lost; by default this is logged."""
        for lines in self._lines.values():
            lines.console = console

    def close(self) -> None:
        """Close the files. A later write opens them again."""
        for lines in self._lines.values():
            lines.close()


_FILES = {
    *("config.toml", "metrics.jsonl", "rollouts.jsonl", "status.json", "hosts.json", "hosts.jsonl", "run_state.json"),
    *("supervised.json", "report.html", "lock"),
}
_FOLDERS = {"logs", "trace", "checkpoints", "journal", "export", "start", "league", ADAPTERS}


def check_files(folder: Path | os.DirEntry[str], *, below: bool = False) -> None:
    """Check that a run's folder has only regular files and folders, and no links, through which a resumed run would
    write elsewhere. Folders that the run itself does not create, such as those of a task, are not checked.

    Args:
        below: Whether this is a folder in a run's folder.

    Raises:
        ConfigError: An entry is neither a regular file nor a folder, or not the one that its name requires. The message
            names the first such entry and the fix.
    """
    try:
        entries = list(os.scandir(folder))
    except NotADirectoryError:
        raise ConfigError(f"{os.fspath(folder)} must be a folder; remove it, or give it another name") from None
    except OSError as error:
        raise ConfigError(f"{os.fspath(folder)} cannot be read: {error.strerror}; make it readable") from None
    for entry in entries:
        if entry.is_symlink():
            raise ConfigError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, and links in a run's folder are not followed; "
                "replace the link with its target, or remove it"
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
    """Read the records of a file into a list; see `each_of`."""
    return list(each_of(path))


def each_of(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a JSON-lines file; a missing file has none. Lines that are not JSON objects are
    skipped: a full disk or a killed process may have truncated a line."""
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
    """Point `link` to `target` atomically, so that the link always exists."""
    fresh = link.with_name(f".{link.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        fresh.symlink_to(target, target_is_directory=True)
        fresh.replace(link)
