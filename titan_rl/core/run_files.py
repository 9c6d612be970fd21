"""Files with the state of a run: `status.json`, its lock, `hosts.json`, `results.json`."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from titan_rl.core.calls.parsing import parse_json_as
from titan_rl.core.errors import means_no_space
from titan_rl.core.files import read_file, read_json

ADAPTERS = "adapters"
"""Folder in the folder of a run with several adapters; it has a folder for each adapter."""
STATUS = "status.json"
LOCK = "lock"
BLOCK_BYTES = 4096
"""Size of a disk block."""
SILENT_S = 120.0
"""Seconds without a change of its lock after which a run on another machine is considered dead. A shared file system
may be a minute late."""
ENDED_AT_ONCE = "a second signal ended it at once"
LOST = "it ended without a message: it was killed, or its machine went down"
DAMAGED = f"its {STATUS} is damaged, so that how it ended is unknown"

State = Literal["running", "finished", "stopped", "failed"]


class RunStatus(msgspec.Struct, forbid_unknown_fields=False, omit_defaults=True):
    """Content of `status.json`: whether a run is running, or how it ended.

    Args:
        state: State that the run has written. A run with "running" whose lock nobody holds has been killed; on another
            machine, one whose lock has not changed for `SILENT_S`.
        began: Time of the first start, in seconds since 1970.
        resumed: Times of the resumptions.
        ended: Time of the last end.
        reason: Reason of the end, for a person.
        waits_for: What a running run waits for, such as "generators: ...".
        seen_from: Result of `seen_from` in the run.
        changes: Inputs that had changed when the run was resumed, such as the code of a task, for a person.
    """

    state: State
    began: float
    resumed: list[float] = msgspec.field(default_factory=list[float])
    ended: float | None = None
    reason: str = ""
    waits_for: str = ""
    seen_from: str = ""
    changes: list[str] = msgspec.field(default_factory=list[str])

    def write(self, folder: Path) -> None:
        """Replace the file atomically. On a full disk overwrite the existing file, which needs no space.

        Raises:
            OSError: the file could not be written.
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
    """Read the status of a run's folder. A run whose status file is missing or damaged counts as failed unless it is
    running. An evaluation has no `config.toml` and no status: its results tell whether it is finished."""
    is_held = is_locked(folder / LOCK)
    reason = LOST
    try:
        status = parse_json_as(read_file(folder / STATUS), RunStatus)
    except (OSError, msgspec.MsgspecError) as error:
        reason = LOST if isinstance(error, OSError) else DAMAGED
        status = RunStatus("running", _began(folder))
        if not is_held and not (folder / "config.toml").exists():
            is_complete = read_results(folder).get("is_complete")
            status.state, status.ended = "finished" if is_complete else "stopped", _last_change(folder)
    if status.state == "running" and not is_held and not _is_alive_elsewhere(folder, status):
        status.state, status.reason, status.ended = "failed", reason, _last_change(folder)
    return status


def record_immediate_end(folder: Path, failure: str = "") -> None:
    """Record in the `status.json` of a run, and of each of its adapters, that it ended at once. An end that was
    recorded before stays.

    Args:
        failure: Reason of a failure; "" if a second signal stopped the run.

    Raises:
        OSError: A file could not be written.
    """
    adapters = (path.parent for path in folder.glob(f"{ADAPTERS}/*/{STATUS}"))
    for each in (folder, *adapters):
        status = read_status(each)
        if status.state == "running" or status.reason in (LOST, DAMAGED):
            status.state, status.reason = ("failed", failure) if failure else ("stopped", ENDED_AT_ONCE)
            status.ended, status.waits_for = time.time(), ""
            status.write(each)


def _is_alive_elsewhere(folder: Path, status: RunStatus) -> bool:
    """Whether a run on another machine has changed its lock recently."""
    if status.seen_from in ("", seen_from()):
        return False
    try:
        return time.time() - (folder / LOCK).stat().st_mtime < SILENT_S
    except OSError:
        return False


def seen_from() -> str:
    """Identifier of this machine and container. Processes with the same one see each other's locks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_locked(path: Path) -> bool:
    """Whether a process holds the file's lock. The lock is not tried, which could make a run fail that is starting."""
    try:
        status = path.stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(device in line and "FLOCK" in line for line in locks.splitlines())


def read_results(folder: Path) -> Mapping[str, Any]:
    """Read the results of an evaluation."""
    try:
        return read_json(read_file(folder / "results.json")) or {}
    except OSError:
        return {}


def _began(folder: Path) -> float:
    """Start time of a run, by the name of its folder or else by its files."""
    if stamp := re.match(r"\d{8}-\d{6}", folder.name):
        return time.mktime(time.strptime(stamp[0], "%Y%m%d-%H%M%S"))
    times = [path.stat().st_mtime for name in ("run_state.json", "config.toml") if (path := folder / name).exists()]
    return min(times, default=_last_change(folder) or 0.0)


def _last_change(folder: Path) -> float | None:
    names = ("metrics.jsonl", "rollouts.jsonl", "results.json", "logs/controller.log", STATUS)
    return max((path.stat().st_mtime for name in names if (path := folder / name).exists()), default=None)


HOSTS = "hosts.json"


class HostEvent(msgspec.Struct, frozen=True):
    """Change of a host's state.

    Args:
        at: Time of the change, in seconds since 1970.
        host: Name of the host.
        what: "joined", "drains", "left" or "lost".
        why: Reason of the change, for a person.
    """

    at: float
    host: str
    what: str
    why: str = ""


class _Host(msgspec.Struct):
    name: str
    address: str = ""
    state: str = ""
    reason: str = ""
    processes: list[str] = []


class _HostRecords(msgspec.Struct):
    hosts: list[_Host] = []
    events: list[HostEvent] = []


def read_hosts(folder: Path) -> dict[str, Any] | None:
    """Read the hosts of a run.

    Args:
        folder: Folder of the run.

    Returns:
        hosts: [{"name", "address", "state", "reason", "does"}]; events: [{"at", "host", "what", "why"}], in order. None
        for a run with a single host and without events.
    """
    try:
        recorded = parse_json_as(read_file(folder / HOSTS), _HostRecords)
    except (OSError, msgspec.MsgspecError):
        return None
    if len(recorded.hosts) < 2 and not recorded.events:
        return None
    return {
        "hosts": [
            {
                "name": host.name,
                "address": host.address,
                "state": host.state,
                "reason": host.reason,
                "does": work_of(host.processes),
            }
            for host in recorded.hosts
        ],
        "events": [msgspec.to_builtins(event) for event in recorded.events],
    }


def work_of(processes: Sequence[str]) -> str:
    """Describe the work of processes with these names.

    Example: trainer, generator-0 and generator-3 are described as "trainer, 2 generators".
    """
    trainer_first = sorted(processes, key=lambda name: (name != "trainer", name))
    kinds = Counter(re.sub(r"-\d+$", "", name).replace("-", " ") for name in trainer_first)
    return ", ".join(kind if count == 1 else f"{count} {kind}s" for kind, count in kinds.items())
