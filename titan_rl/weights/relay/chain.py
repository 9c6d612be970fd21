"""Which host reads a version from which. Standard library only."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT = 4  # versions whose chains are known
REMEMBERED = 8  # versions for which a host that was complained about has no readers


class Sender(NamedTuple):
    """A host to read from."""

    name: str
    address: str
    hops: int  # it is from the trainer


@dataclass(slots=True, eq=False)
class _Host:
    name: str
    address: str
    parent: _Host | None  # None is the trainer
    children: int = 0
    is_bad: bool = False  # dead, silent, or slow


@dataclass(slots=True)
class _Version:
    hosts: dict[str, _Host] = field(default_factory=dict[str, _Host])  # in the order in which they came


class Chain:
    """Has each host read a version from one that has it or is getting it, so that the trainer sends it about once.

    With `fanout` 1 the hosts are a chain, in the order in which they come; with more a tree. A host that another one
    complains about gets no more readers for some versions, and does not count as one of its sender's: it may be as slow
    as it likes.

    Example:

        chain.place(7, "b", "10.0.0.2:4711") is None              # from the trainer
        chain.place(7, "c", "10.0.0.3:4711") == ("b", "10.0.0.2:4711", 1)
        chain.place(7, "c", "10.0.0.3:4711", avoid=["b"]) is None  # b is dead
    """

    def __init__(self, fanout: int = 1) -> None:
        self._fanout = fanout
        self._versions: dict[int, _Version] = {}
        self._order: deque[int] = deque(maxlen=KEPT)
        self._blamed: dict[str, int] = {}  # at which version
        self._lock = threading.Lock()

    def place(self, version: int, name: str, address: str, avoid: Collection[str] = ()) -> Sender | None:
        """The host to read from, or None where that is the trainer.

        Args:
            name, address: of the host that asks, and where others can read from it.
            avoid: hosts that it could not read from, or found slow.
        """
        with self._lock:
            hosts = self._hosts_of(version)
            for bad in avoid:
                if bad in hosts:
                    self._blame(hosts[bad])
                    self._blamed[bad] = version
            was_bad = version < self._blamed.get(name, version - REMEMBERED) + REMEMBERED
            host = hosts.pop(name, None) or _Host(name, address, None, is_bad=was_bad)
            self._count(host, -1)
            host.address = address
            parent = self._parent(hosts, host, avoid)
            host.parent = parent
            hosts[name] = host  # behind those that were there, so that readers find it last
            self._count(host, 1)
            return None if parent is None else Sender(parent.name, parent.address, _hops(parent))

    def _parent(self, hosts: dict[str, _Host], host: _Host, avoid: Collection[str]) -> _Host | None:
        of_trainer = sum(other.parent is None and not other.is_bad for other in hosts.values())
        if of_trainer < self._fanout:
            return None
        for other in hosts.values():
            fits = not other.is_bad and other.name not in avoid and other.children < self._fanout
            if fits and not _is_behind(other, host):
                return other
        return None

    def _blame(self, host: _Host) -> None:
        if not host.is_bad:
            self._count(host, -1)
            host.is_bad = True

    def _count(self, host: _Host, change: int) -> None:
        if host.parent is not None and not host.is_bad:
            host.parent.children += change

    def _hosts_of(self, version: int) -> dict[str, _Host]:
        if version not in self._versions:
            if len(self._order) == KEPT:
                del self._versions[self._order[0]]
            self._order.append(version)
            self._versions[version] = _Version()
        return self._versions[version].hosts


def _hops(host: _Host | None) -> int:
    hops = 0
    while host is not None:
        hops, host = hops + 1, host.parent
    return hops


def _is_behind(host: _Host | None, other: _Host) -> bool:
    while host is not None:
        if host is other:
            return True
        host = host.parent
    return False
