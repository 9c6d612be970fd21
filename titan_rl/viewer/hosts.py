"""What a run says of its hosts, for whoever looks at it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.core.calls.parsing import parse_json_as
from titan_rl.viewer.files import read_file

HOSTS = "hosts.json"


class HostEvent(msgspec.Struct, frozen=True):
    """What became of a host.

    Args:
        at: seconds since 1970.
        what: "joined", "drains", "left" or "lost".
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


class _Said(msgspec.Struct):
    hosts: list[_Host] = []
    events: list[HostEvent] = []


def read_hosts(folder: Path) -> dict[str, Any] | None:
    """
    Args:
        folder: of a run.

    Returns:
        hosts: [{"name", "address", "state", "reason", "does"}]; events: [{"at", "host", "what", "why"}], in their
        order. None of a run that has one host, to which nothing happened.
    """
    try:
        said = parse_json_as(read_file(folder / HOSTS), _Said)
    except (OSError, msgspec.MsgspecError):
        return None
    if len(said.hosts) < 2 and not said.events:
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
            for host in said.hosts
        ],
        "events": [msgspec.to_builtins(event) for event in said.events],
    }


def work_of(processes: Sequence[str]) -> str:
    """What these are for.

    Example: of trainer, generator-0 and generator-3 it is "trainer, 2 generators".
    """
    kinds = Counter(re.sub(r"-\d+$", "", name).replace("-", " ") for name in sorted(processes, key=_place))
    return ", ".join(kind if count == 1 else f"{count} {kind}s" for kind, count in kinds.items())


def _place(name: str) -> tuple[bool, str]:
    return name != "trainer", name
