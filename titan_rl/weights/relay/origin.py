"""Trainer rank's end of the relay: its shards for other hosts, whole and as deltas, and the chain of hosts that read
them."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_rl.weights.relay.delta import ChunkDelta, encode_delta
from titan_rl.weights.relay.server import RelayServer, RemoteShard
from titan_rl.weights.relay.shard_copy import ShardCopy

KEPT = 4  # number of versions whose chains are known
REMEMBERED = 8  # number of versions for which a reported host gets no readers


class Sender(NamedTuple):
    """A host to read from."""

    name: str
    address: str
    hops: int  # distance from the trainer


@dataclass(slots=True, eq=False)
class _Host:
    name: str
    address: str
    parent: _Host | None  # None is the trainer
    children: int = 0
    is_bad: bool = False  # dead, silent, or slow

    def path(self) -> Iterator[_Host]:
        """This host, the one from which it reads, and so on up to the one that reads from the trainer."""
        host: _Host | None = self
        while host is not None:
            yield host
            host = host.parent


class Chain:
    """Assigns each host another host to read a version from, which has the version or is reading it, so that the
    trainer normally sends it only once.

    With `fanout` 1 the hosts form a chain in the order in which they ask, and with a larger one a tree. A host that
    another host reports gets no readers for some versions, and does not count towards its sender's fanout, so its
    slowness affects no other host.

    Example:

        chain.assign(7, "b", "10.0.0.2:4711") is None              # from the trainer
        chain.assign(7, "c", "10.0.0.3:4711") == ("b", "10.0.0.2:4711", 1)
        chain.assign(7, "c", "10.0.0.3:4711", avoid=["b"]) is None  # b is dead
    """

    def __init__(self, fanout: int = 1) -> None:
        self._fanout = fanout
        self._versions: dict[int, dict[str, _Host]] = {}  # hosts of each version, in the order of their requests
        self._blamed: dict[str, int] = {}  # version at which each host was reported last
        self._lock = threading.Lock()

    def assign(self, version: int, name: str, address: str, avoid: Collection[str] = ()) -> Sender | None:
        """Assign a host to read from; None stands for the trainer.

        Args:
            version: Version to read.
            name, address: Name and address of the host that asks.
            avoid: Names of hosts from which it could not read, or which it found slow.
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
            hosts[name] = host  # last, so that readers are assigned to it last
            self._count(host, 1)
            return None if parent is None else Sender(parent.name, parent.address, len([*parent.path()]))

    def _parent(self, hosts: dict[str, _Host], host: _Host, avoid: Collection[str]) -> _Host | None:
        of_trainer = sum(other.parent is None and not other.is_bad for other in hosts.values())
        if of_trainer < self._fanout:
            return None
        for other in hosts.values():
            fits = not other.is_bad and other.name not in avoid and other.children < self._fanout
            if fits and host not in other.path():
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
            if len(self._versions) == KEPT:
                del self._versions[next(iter(self._versions))]
            self._versions[version] = {}
        return self._versions[version]


SAMPLED = 8  # number of chunks that decide whether a version is sent as deltas


class ShardOrigin:
    """Offers one rank's versions to other hosts, whole and as the chain of deltas since an older version.

    A version gets a delta to the previous one if some host has read since then, or has a version from which the chain
    of deltas is known, unless the version is an anchor or most of its numbers changed. Threads encode the delta chunk
    by chunk while it is sent. A host that missed versions receives the deltas of all of them. The deltas of a chunk are
    kept as long as together they have fewer bytes than the chunk.

    Args:
        interface: Address at which other hosts reach this one.
        fanout: Number of hosts to which each host sends a version.
        anchor_interval: Versions that are a multiple of this number are sent whole; 1 makes no deltas.

    Raises:
        StateDictError: The server cannot listen at `interface`.
    """

    def __init__(self, interface: str, *, fanout: int, anchor_interval: int) -> None:
        self._key, self._token = secrets.token_hex(8), secrets.token_hex(16)
        self._chain = Chain(fanout)
        self._anchor_interval = anchor_interval
        self._is_read = False  # another host has read since the newest version was offered
        self._last_read: int | None = None  # newest version that another host reads
        self._encoding: threading.Thread | None = None
        self._stop = threading.Event()
        self._server = RelayServer(interface, place=self._assign)
        self._server.admit(self._token)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to all hosts, of all versions."""
        return self._server.sent_bytes

    def offer(self, version: int, data: NDArray[np.uint8], word: int) -> RemoteShard:
        """Let other hosts read a published shard.

        Args:
            version: Version of the shard.
            data: Memory of the shard, which must not be written to before `settle`.  # [num_bytes]
            word: Size in bytes of most of its numbers, 2 or 4.
        """
        copy = ShardCopy(version, data)
        older = self._server.copies(self._key)
        base = older[max(older)] if older else None
        is_anchor = version % self._anchor_interval == 0
        if is_anchor or base is None or len(base.data) != len(data) or not self._is_wanted(base):
            copy.complete()
        else:
            self._stop.clear()
            self._encoding = threading.Thread(
                target=self._encode, args=(base, copy, word), name="encode weights", daemon=True
            )
            self._encoding.start()
        self._is_read = False
        self._server.offer(self._key, copy)
        return RemoteShard(self._server.address, self._key, version, self._token)

    def settle(self) -> None:
        """Stop encoding, so that the memory of older versions may be written to. Chunks without a delta get none."""
        self._stop.set()
        if self._encoding is not None:
            self._encoding.join()
            self._encoding = None

    def keep(self, versions: Collection[int]) -> None:
        """Withdraw all other versions."""
        for version in self._server.copies(self._key).keys() - set(versions):
            self._server.withdraw(self._key, version)

    def close(self) -> None:
        self.settle()
        self.keep(())
        self._server.close()

    def _is_wanted(self, base: ShardCopy) -> bool:
        """Whether deltas from `base` would save bytes for some host."""
        return self._is_read or (self._last_read is not None and base.follows(self._last_read))

    def _assign(self, message: dict[str, Any]) -> dict[str, Any]:
        version = int(message["version"])
        self._is_read = True
        self._last_read = version if self._last_read is None else max(version, self._last_read)
        avoid = [str(name) for name in message["avoid"]]
        sender = self._chain.assign(version, str(message["host"]), str(message["address"]), avoid)
        name, address, hops = sender or ("", self._server.address, 0)
        return {"host": name, "address": address, "hops": hops}

    def _encode(self, base: ShardCopy, copy: ShardCopy, word: int) -> None:
        def encoded(index: int) -> bytes | None:
            return None if self._stop.is_set() else encode_delta(base.chunk(index), copy.chunk(index), word)

        try:
            sample = range(0, copy.num_chunks, -(-copy.num_chunks // SAMPLED))
            if sum(encoded(index) is None for index in sample) > len(sample) / 2:
                return
            workers = max(1, min(4, (os.cpu_count() or 1) // 2))
            with ThreadPoolExecutor(workers, thread_name_prefix="encode weights") as threads:
                for one in threads.map(encoded, range(copy.num_chunks)):
                    copy.add(() if one is None else (ChunkDelta.of(base.version, one),), base)
        finally:
            copy.complete()
