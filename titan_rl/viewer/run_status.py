"""Where a run stands, told by a few small files and the ends of large ones."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from titan_rl.config.tasks import name_of
from titan_rl.core.calls.parsing import parse_json_as, parse_toml
from titan_rl.core.errors import means_no_space
from titan_rl.viewer.files import file_status, read_file
from titan_rl.viewer.records import as_list, as_table, read_json
from titan_rl.viewer.tail import last_lines

STATUS = "status.json"
LOCK = "lock"
BLOCK_BYTES = 4096
"""What a file of any size has on a disk."""
SILENT_S = 120.0
"""Longest time without a sign of life of a run whose lock is not seen from here. A file system that is shared may tell
a minute late."""
LOST = "it ended without a word: it was killed, or its machine went down"

State = Literal["running", "finished", "stopped", "failed"]


class RunStatus(msgspec.Struct, forbid_unknown_fields=False, omit_defaults=True):
    """`status.json`: whether a run goes on, or how it ended.

    Args:
        state: what the run says of itself. One that says "running" and that nobody holds the lock of has been killed;
            from where that is not seen, one whose lock was not touched for `SILENT_S`.
        began: when it began at first, in seconds since 1970.
        resumed: when it went on, each time.
        ended: when it ended the last time.
        reason: of its end, for a person.
        waits_for: what keeps it from going on, while it goes on; as "generators: ...".
        seen_from: as `seen_from` said there.
    """

    state: State
    began: float
    resumed: list[float] = msgspec.field(default_factory=list[float])
    ended: float | None = None
    reason: str = ""
    waits_for: str = ""
    seen_from: str = ""

    def write(self, folder: Path) -> None:
        """Replace the file in one step; on a disk that is full, overwrite the one that is there, which takes no room.

        Raises:
            OSError: it could not be written.
        """
        fresh = folder / f".{STATUS}-{os.getpid()}"
        try:
            fresh.write_bytes(msgspec.json.encode(self))
            fresh.replace(folder / STATUS)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            if not means_no_space(error):
                raise
            self._overwrite(folder / STATUS)

    def _overwrite(self, path: Path) -> None:
        brief = self
        while len(text := msgspec.json.encode(brief)) > BLOCK_BYTES and brief.reason:
            brief = msgspec.structs.replace(brief, reason=brief.reason[: len(brief.reason) // 2])
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb", buffering=0) as file:
            file.write(text)
            file.truncate()


def read_status(folder: Path) -> RunStatus:
    """What a folder says of itself, or what its files tell where it says nothing."""
    is_held = is_locked(folder / LOCK)
    try:
        status = parse_json_as(read_file(folder / STATUS), RunStatus)
    except (OSError, msgspec.MsgspecError):
        ended = None if is_held else _last_change(folder)
        state: State = "running" if is_held else "finished" if _has_result(folder) else "stopped"
        return RunStatus(state, _began(folder), ended=ended)
    if status.state == "running" and not is_held and not _is_heard_of(folder, status):
        status.state, status.reason, status.ended = "failed", LOST, _last_change(folder)
    return status


def _is_heard_of(folder: Path, status: RunStatus) -> bool:
    """Whether a run whose lock is not seen from here has given a sign of life."""
    if status.seen_from in ("", seen_from()):
        return False
    try:
        return time.time() - (folder / LOCK).stat().st_mtime < SILENT_S
    except OSError:
        return False


def seen_from() -> str:
    """Processes that say the same see each other's locks: those of a machine, but for containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_locked(path: Path) -> bool:
    """Whether a process holds the file's lock. Trying to take it would keep a run that begins just then from it."""
    try:
        status = path.stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(device in line and "FLOCK" in line for line in locks.splitlines())


def describe_run(name: str, folder: Path) -> dict[str, Any]:
    """An entry of /api/runs, without its id."""
    status, config, record = read_status(folder), read_config(folder), _last_record(folder)
    results = read_results(folder)
    steps = record.get("step", results.get("version", 0))
    seconds = record.get("time_s", results.get("seconds", 0.0))
    if status.state == "running":
        seconds = max(_number(seconds), time.time() - max([status.began, *status.resumed]))
    return {
        "name": name,
        "kind": "evaluation" if results else "sft" if (folder / "supervised.json").exists() else "train",
        "state": status.state,
        "reason": status.reason,
        "waits_for": status.waits_for,
        "steps": int(_number(steps)),
        "steps_planned": steps_planned(folder, config),
        "began": status.began,
        "resumed": status.resumed,
        "ended": status.ended,
        "seconds": _number(seconds),
        "tasks": tasks_of(config) or list(results.get("tasks", ())),
    }


def read_config(folder: Path) -> Mapping[str, Any]:
    """The settings; none where they cannot be read."""
    path = folder / "config.toml"
    try:
        status = file_status(path)
        return _parsed(path, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        return {}


@lru_cache(1024)
def _parsed(path: Path, mtime_ns: int, size: int) -> Mapping[str, Any]:
    """Hundreds of runs are looked at twice a second, and their settings hardly ever differ."""
    return parse_toml(read_file(path).decode())


def config_text(folder: Path) -> str:
    try:
        return read_file(folder / "config.toml").decode(errors="replace")
    except OSError:
        return ""


def steps_planned(folder: Path, config: Mapping[str, Any]) -> int | None:
    """None of what has no steps."""
    steps = as_table(config.get("training")).get("steps")
    return steps if isinstance(steps, int) else None


def tasks_of(config: Mapping[str, Any]) -> list[str]:
    """The names of a run's tasks."""
    tables = map(as_table, as_list(config.get("tasks")) or [config.get("task")])
    return [
        str(table.get("name") or name_of(str(table["type"]).rpartition(":")[2])) for table in tables if "type" in table
    ]


def read_results(folder: Path) -> Mapping[str, Any]:
    """Of an evaluation."""
    try:
        return read_json(read_file(folder / "results.json")) or {}
    except OSError:
        return {}


def _has_result(folder: Path) -> bool:
    return bool(read_results(folder).get("is_complete")) or (folder / "export").is_dir()


def _last_record(folder: Path) -> Mapping[str, Any]:
    """Of the metrics, the last one that can be read."""
    path = folder / "metrics.jsonl"
    try:
        status = file_status(path)
    except OSError:
        return {}
    return _last_step(path, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(1024)
def _last_step(path: Path, inode: int, size: int, mtime_ns: int) -> Mapping[str, Any]:
    for line in last_lines(path):
        record = read_json(line)
        if record is not None and isinstance(record.get("step"), int | float):
            return record
    return {}


def _began(folder: Path) -> float:
    """A run's folder is named by the time it was made at."""
    if stamp := re.match(r"\d{8}-\d{6}", folder.name):
        return time.mktime(time.strptime(stamp[0], "%Y%m%d-%H%M%S"))
    times = [path.stat().st_mtime for name in ("run_state.json", "config.toml") if (path := folder / name).exists()]
    return min(times, default=_last_change(folder) or 0.0)


def _last_change(folder: Path) -> float | None:
    names = ("metrics.jsonl", "rollouts.jsonl", "results.json", "logs/controller.log", STATUS)
    return max((path.stat().st_mtime for name in names if (path := folder / name).exists()), default=None)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
