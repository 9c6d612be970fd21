"""Requests about the hosts of a run and its answers, as files in its folder. The folder's permissions decide who may
send requests."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from titan_rl.cluster.hosts.lifecycle import HostStatus
from titan_rl.config.hosts import split_address
from titan_rl.core.calls.parsing import parse_json_as
from titan_rl.core.console import aligned
from titan_rl.core.errors import ConfigError, TitanRLError
from titan_rl.core.files import read_file
from titan_rl.core.run_files import HOSTS, HostEvent, read_status

logger = logging.getLogger(__name__)

POLL_S = 0.1
PROMISE_S = 1.0
"""Time in seconds after which a request is reported as accepted, because refusals usually arrive sooner."""

ENDED = {"finished": "it finished", "stopped": "it was stopped", "failed": "it failed"}
"""Description of the state of a run that has ended."""

Wish = Literal["add", "drain"]


class HostRequest(msgspec.Struct, frozen=True):
    """Request to add or drain a host.

    Args:
        id: Key of the answer.
        what: Address of the worker to add, or name of the host to drain.
    """

    id: str
    do: Wish
    what: str


class HostStates(msgspec.Struct):
    """Statuses of the hosts of a run, and answers to requests.

    Args:
        answers: Answers by the id of the request: "" for success, otherwise the reason of the refusal.
        events, counts: Events of hosts and their numbers; see `HostHistory`.
    """

    hosts: list[HostStatus] = msgspec.field(default_factory=list[HostStatus])
    answers: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    events: list[HostEvent] = msgspec.field(default_factory=list[HostEvent])
    counts: dict[str, int] = msgspec.field(default_factory=dict[str, int])


class HostFiles:
    """Files of requests and answers: `hosts.jsonl`, to which others append requests, and `hosts.json`, which the run
    writes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._requests = run_dir / "hosts.jsonl"
        self._states = run_dir / HOSTS
        self._read = self._requests.stat().st_size if self._requests.exists() else 0

    def begin(self) -> None:
        """Remove the answers of an earlier process of this run. Requests from now on are answered once the run's
        processes are up."""
        self._states.unlink(missing_ok=True)

    def new_requests(self) -> list[HostRequest]:
        """Return the requests since the previous call, or since this object was made."""
        try:
            with self._requests.open("rb") as file:
                file.seek(self._read)
                lines = file.read().splitlines(keepends=True)
        except OSError:  # there are no requests, or the file cannot be read at the moment
            return []
        requests: list[HostRequest] = []
        for line in lines:
            if not line.endswith(b"\n"):  # the line is still being written
                break
            self._read += len(line)
            try:
                requests.append(parse_json_as(line, HostRequest))
            except msgspec.MsgspecError:
                continue
        return requests

    def write(self, states: HostStates) -> None:
        fresh = self._states.with_name(f".{self._states.name}-{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(states))
        fresh.replace(self._states)

    @property
    def is_running(self) -> bool:
        """Whether the run is in progress."""
        return read_status(self._run_dir).state == "running"

    def states(self, wait_s: float = 0.0, on_wait: Callable[[], object] = lambda: None) -> HostStates:
        """Read the current statuses, or the last ones of a run that has ended.

        Args:
            wait_s: Longest wait for the processes of a run that is still starting, in seconds.
            on_wait: Called if there is such a wait.

        Raises:
            ConfigError: The run's processes are not up yet, or were not when it ended.
        """
        until = time.monotonic() + wait_s
        if wait_s and self._read_states() is None and self.is_running:
            on_wait()
        while time.monotonic() < until and self._read_states() is None and self.is_running:
            time.sleep(POLL_S)
        if (states := self._read_states()) is None:
            raise ConfigError(
                f"the run in {self._run_dir} does not list its hosts: they are listed once its processes have started, "
                "or never if it has no processes"
            )
        return states

    def ask(
        self,
        do: Wish,
        what: str,
        wait_s: float,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        """Send a request to the run, and wait until it is done. A run that is still starting answers after that.

        Args:
            on_wait: Called if the run does not answer at once. The run carries out the request even if nobody waits.

        Raises:
            ConfigError: The run has ended, or refuses with a reason.
            TitanRLError: The run has not answered within `wait_s` seconds.
        """
        self._check_running()
        request = HostRequest(secrets.token_hex(8), do, what)
        allowed = stat.S_IMODE(self._run_dir.stat().st_mode) & 0o666  # readable by everyone who may read the folder
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            with open(os.open(self._requests, flags, allowed), "ab") as file:
                file.write(msgspec.json.encode(request) + b"\n")
        except OSError as error:
            raise ConfigError(
                f"{self._requests} cannot be written: {error.strerror}; it must be a writable file, not a link"
            ) from None
        began, promised = time.monotonic(), False
        while (waited := time.monotonic() - began) < wait_s:
            if waited >= PROMISE_S and not promised:
                promised = True
                on_wait()
            time.sleep(POLL_S)
            answer = None if (states := self._read_states()) is None else states.answers.get(request.id)
            if answer:
                raise ConfigError(answer)
            if answer == "":
                return
            self._check_running()
        raise TitanRLError(f"the run was asked to {do} {what}, and did not answer within {wait_s:g} s")

    def _check_running(self) -> None:
        if (state := read_status(self._run_dir).state) == "running":
            return
        how, command = ENDED[state], "sft" if (self._run_dir / "supervised.json").exists() else "train"
        again = "" if state == "finished" else f"; titan-rl {command} --resume {self._run_dir} continues it"
        raise ConfigError(f"the run in {self._run_dir} has ended: {how}{again}")

    def _read_states(self) -> HostStates | None:
        try:
            return parse_json_as(read_file(self._states), HostStates)
        except (OSError, msgspec.MsgspecError):
            return None


def describe(states: HostStates) -> str:
    """Format statuses as a table.

    Example:

        host  address        state       processes
        h1    10.0.0.1:22222  in the run  trainer, generator-0
        since the run began: 1 joined, 0 left, 1 lost
    """
    rows = [("host", "address", "state", "processes")]
    for host in states.hosts:
        state = f"{host.state}: {host.reason}" if host.reason else host.state
        rows.append((host.name or "-", host.address, state, ", ".join(host.processes)))
    counted = ", ".join(f"{count} {what}" for what, count in states.counts.items())
    became = [f"since the run began: {counted}"] if any(states.counts.values()) else []
    return "".join(f"{line}\n" for line in [*aligned(rows), *became])


class AddressFile:
    """File with one worker address per line, and comments after #."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, frozenset[str]] = 0, frozenset()

    def read(self) -> frozenset[str]:
        """Addresses in the file. While it cannot be read, those of the last successful read."""
        try:
            written = self._path.stat().st_mtime_ns
            if written != self._read[0]:
                lines = (line.partition("#")[0].strip() for line in self._path.read_text().splitlines())
                self._read = written, frozenset(filter(self._is_address, filter(None, lines)))
        except OSError as error:
            logger.warning("the addresses in %s cannot be read: %s", self._path, error)
        return self._read[1]

    def _is_address(self, line: str) -> bool:
        try:
            split_address(line)
        except ValueError as error:
            logger.warning("a line of %s names no worker: %s", self._path, error)
            return False
        return True
