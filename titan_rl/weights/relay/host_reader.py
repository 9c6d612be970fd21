"""Reader of a host: one process downloads each shard for all readers of its host, and sends it on to other hosts.

The process owns a folder of the run by a lock that is released when the process ends, so that another process can take
over at once. A file in this folder contains its address; only processes of the same user can read it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError
from titan_rl.weights.relay.delta import ChunkDelta, apply_delta
from titan_rl.weights.relay.origin import Sender
from titan_rl.weights.relay.server import (
    ConnectionLostError,
    Kind,
    RelayServer,
    RemoteShard,
    ask,
    connect,
    receive_head,
    receive_into,
    send,
)
from titan_rl.weights.relay.shard_copy import ShardCopy
from titan_rl.weights.shard_files import PREFIX, FileShardStore, checksum, shard_root
from titan_rl.weights.types import NUM_KEPT

TRIAL_S = 1.0  # seconds between two comparisons of a sender one hop from the trainer with the trainer itself
MUCH_FASTER = 3.0  # ratio of rates from which on the trainer is much faster
MIN_TRIAL_BYTES = 1 << 18  # fewer bytes do not measure the rate


class SlowError(Exception):
    """The sender is slow, or the rate of the trainer is unknown. Reading one chunk from the trainer decides."""


class Pace:
    """Rate at which the trainer sends to this host, in bytes per second, once measured."""

    def __init__(self) -> None:
        self.of_trainer: float | None = None

    def compare(self, bytes_per_s: float, trial_bytes: int, trial_s: float) -> bool:
        """Whether the trainer, which sent `trial_bytes` in `trial_s` seconds, is much faster than `bytes_per_s`. The
        rate of a small delta says little about the link and is not kept."""
        if trial_bytes >= MIN_TRIAL_BYTES:
            self.of_trainer = trial_bytes / trial_s
        return bytes_per_s * MUCH_FASTER < trial_bytes / trial_s

    def is_slow(self, bytes_per_s: float) -> bool:
        return self.of_trainer is None or bytes_per_s * MUCH_FASTER < self.of_trainer


class PaceWatch:
    """Measures the rate of one sender at intervals.

    Args:
        pace: Rate of the trainer.
        hops: Distance of the sender from the trainer. Readers nearer to the trainer compare earlier, since their sender
            may be the cause of the others' slowness.
    """

    def __init__(self, pace: Pace, hops: int) -> None:
        self._pace = pace
        self._every_s = hops * TRIAL_S
        self._begin()

    def note_bytes(self, num_bytes: int) -> None:
        """Note that bytes have arrived.

        Raises:
            SlowError: It is time to compare the sender with the trainer.
        """
        self._bytes += num_bytes
        if time.monotonic() - self._began < self._every_s:
            return
        if self._pace.is_slow(self.bytes_per_s):
            raise SlowError
        self._begin()

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / max(time.monotonic() - self._began, 1e-6)

    def _begin(self) -> None:
        self._began, self._bytes = time.monotonic(), 0


logger = logging.getLogger(__name__)

RETRY_S = 0.2  # pause between two attempts to reach the trainer
ALL = 1 << 40  # more chunks than any shard has


class Download:
    """Fills a copy of a shard. If a sender is gone, silent or slow, the download continues at the same chunk from
    another host, and as a last resort from the trainer.

    Args:
        remote: Shard on the trainer.
        base: Copy of an older version, to which deltas are applied; None reads everything whole.
        name: Name of this reader, unique among the readers.
        address: Address at which other hosts can read from this reader.
        timeout_s: Time limit for the shard.
        pace: Rate of the trainer, known from earlier versions.
    """

    def __init__(
        self, remote: RemoteShard, base: ShardCopy | None, *, name: str, address: str, timeout_s: float, pace: Pace
    ) -> None:
        self._remote = remote
        self._base = base
        self._name = name
        self._address = address
        self._timeout_s = timeout_s
        self._pace = pace
        self._deadline = time.monotonic() + timeout_s
        self._trainer = Sender("", remote.address, 0)
        self._avoid: list[str] = []
        self.received_bytes = 0

    def run(self, copy: ShardCopy, *, from_trainer: bool = False) -> None:
        """Fill the copy, from other hosts and by deltas if possible.

        Args:
            copy: Copy to fill.
            from_trainer: Whether to read all bytes from the trainer.

        Raises:
            StateDictError: The trainer no longer has the version, or cannot be reached in time.
        """
        if from_trainer:
            self._base = None
        while not copy.is_complete:
            sender = self._trainer
            try:
                if not from_trainer:
                    sender = self._find_sender(copy.version)
                self._read_from(sender, copy)
            except ConnectionLostError as error:
                self._lost(sender.name, copy.version, error)
            except StateDictError as error:
                if not sender.name:
                    raise
                self._lost(sender.name, copy.version, error)

    def _read_from(self, sender: Sender, copy: ShardCopy) -> None:
        """Read until the copy is whole."""
        while not copy.is_complete:
            watch = PaceWatch(self._pace, sender.hops) if sender.name else None
            try:
                self._read(copy, sender.address, watch=watch)
            except SlowError:
                assert watch is not None
                self._compare(watch.bytes_per_s, copy)

    def _compare(self, bytes_per_s: float, copy: ShardCopy) -> None:
        """Read the next chunk from the trainer, and leave the sender if the trainer is much faster."""
        began, had = time.monotonic(), self.received_bytes
        self._read(copy, self._trainer.address, count=1)
        if self._pace.compare(bytes_per_s, self.received_bytes - had, time.monotonic() - began):
            raise ConnectionLostError("the trainer itself is much faster")

    def _lost(self, sender: str, version: int, error: Exception) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s < 0 or (not sender and isinstance(error.__cause__, ConnectionRefusedError)):
            raise StateDictError(
                f"version {version} could not be read from {sender or 'the trainer'} in "
                f"{self._timeout_s - left_s:.1f} s: {error}"
            ) from error
        logger.info("version %d is read from a host other than %s: %s", version, sender or "the trainer", error)
        if sender:
            self._avoid.append(sender)
        else:
            time.sleep(RETRY_S)

    def _find_sender(self, version: int) -> Sender:
        message = {"ask": "place", "token": self._remote.token, "version": version, "avoid": self._avoid}
        answer = ask(self._remote.address, {**message, "host": self._name, "address": self._address})
        return Sender(str(answer["host"]), str(answer["address"]), int(answer["hops"]))

    def _read(self, copy: ShardCopy, address: str, *, count: int = ALL, watch: PaceWatch | None = None) -> None:
        """Read the next `count` chunks, by default all.

        Raises:
            SlowError: See `PaceWatch.note_bytes`.
        """
        remote = self._remote
        with connect(address) as connection:
            message = {"ask": "read", "token": remote.token, "key": remote.key, "version": copy.version}
            base = None if self._base is None else self._base.version
            send(connection, {**message, "base": base, "first": copy.ready, "count": count})
            last = min(copy.ready + count, copy.num_chunks)
            steps: list[ChunkDelta] = []  # deltas so far of the current chunk
            while copy.ready < last:
                head = receive_head(connection)
                if watch is not None:
                    watch.note_bytes(0)
                if time.monotonic() > self._deadline:
                    raise ConnectionLostError(f"{copy.ready} of {copy.num_chunks} chunks are here")
                if head.kind is Kind.WAIT:
                    continue
                chunk = copy.chunk(copy.ready)
                size = len(chunk)
                fits = head.num_bytes == size if head.kind is Kind.RAW else head.num_bytes < size
                if head.index != copy.ready or not fits:
                    raise ConnectionLostError(f"chunk {head.index} of {head.num_bytes} bytes is not chunk {copy.ready}")
                if head.kind is Kind.RAW:
                    self._receive(connection, chunk.data, watch)
                    copy.add()
                    steps.clear()
                else:
                    encoded = bytearray(head.num_bytes)
                    self._receive(connection, memoryview(encoded), watch)
                    step = ChunkDelta(head.base, bytes(encoded), head.crc)
                    self._apply(copy, step, is_first=not steps)
                    steps.append(step)
                    if head.kind is Kind.DELTA:
                        copy.add(steps, self._base)
                        steps.clear()
                self.received_bytes += head.num_bytes

    def _receive(self, connection: socket.socket, memory: memoryview, watch: PaceWatch | None) -> None:
        for num_bytes in receive_into(connection, memory):
            if watch is not None:
                watch.note_bytes(num_bytes)

    def _apply(self, copy: ShardCopy, step: ChunkDelta, *, is_first: bool) -> None:
        base = self._base
        if base is None or (is_first and step.base != base.version):
            raise ConnectionLostError("a delta that was not requested")
        chunk = copy.chunk(copy.ready)
        if is_first:
            chunk[:] = base.chunk(copy.ready)
        try:
            if zlib.crc32(step.encoded) != step.crc:
                raise StateDictError("a delta of weights does not match the checksum that its sender reports")
            apply_delta(step.encoded, chunk)
        except StateDictError as error:
            self._base = None  # this chunk and the rest are read whole
            raise ConnectionLostError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Leader:
    """Address of the process that reads for its host, and the token that requests to it need."""

    address: str
    token: str


class Rendezvous:
    """Election of the process that reads for its host, by a lock in a folder of the run.

    Args:
        run_id, root: See `ShardStore`.
    """

    def __init__(self, run_id: str, root: Path | None = None) -> None:
        self._folder = (root or shard_root()) / f"{PREFIX}{run_id}-reader"
        self._lock: int | None = None

    def lead(self) -> bool:
        """Try to become the process that reads for its host; return whether it succeeded.

        Raises:
            OSError: The folder cannot be made.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(self._folder, os.O_RDONLY)
        except FileNotFoundError:
            return False  # the folder is being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(self._folder)):
                (self._folder / "leader").unlink(missing_ok=True)  # address of the previous leader
                self._lock = lock
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)
        return False

    def announce(self, leader: Leader) -> None:
        """Publish this process's address to the others."""
        hidden = self._folder / ".leader"
        hidden.write_text(json.dumps({"address": leader.address, "token": leader.token}))
        hidden.rename(self._folder / "leader")

    def leader(self) -> Leader | None:
        """The process that reads for the others, if it has announced itself."""
        try:
            return Leader(**json.loads((self._folder / "leader").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def leave(self) -> None:
        """Give up the lead, so that another process can take it. Does nothing in a process that does not lead."""
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


@dataclass(frozen=True, slots=True)
class WantedShard:
    """A shard and its source, which one process of a host sends to another as JSON."""

    num_bytes: int
    checksum: int
    remote: RemoteShard
    keys: tuple[str, ...]  # keys of all shards of the version


@dataclass(frozen=True, slots=True)
class ReadShard:
    """Location of a shard on this host."""

    path: Path
    received_bytes: int  # received from other hosts for the shard


class HostReader:
    """Reads each shard once into shared memory, and lets other hosts read it in the meantime.

    Args:
        run_id, root: See `ShardStore`.
        name: Name of this host, or another name that is unique among the readers.
        interface: Address at which other hosts reach this one.
        timeout_s: Time limit for one shard.

    Raises:
        StateDictError: The reader cannot listen at `interface`.
    """

    def __init__(self, run_id: str, root: Path | None, *, name: str, interface: str, timeout_s: float) -> None:
        self._run_id = run_id
        self._root = root
        self._name = name
        self._timeout_s = timeout_s
        self._pace = Pace()
        self._stores: dict[str, FileShardStore] = {}
        self._found: dict[tuple[str, int], Future[ReadShard]] = {}
        self._lock = threading.Lock()
        self._server = RelayServer(interface, fetch=self._fetch_for_another)
        self.token = secrets.token_hex(16)
        self._server.admit(self.token)

    @property
    def address(self) -> str:
        return self._server.address

    def fetch(self, wanted: WantedShard) -> ReadShard:
        """Return the shard on this host, and read it if it is not there yet. Concurrent callers share one transfer.

        Raises:
            StateDictError: The shard could not be read, or differs from what was published.
        """
        key_version = wanted.remote.key, wanted.remote.version
        with self._lock:
            found = self._found.get(key_version)
            is_first = found is None
            if found is None:
                found = self._found[key_version] = Future()
        if is_first:
            try:
                found.set_result(self._fetch(wanted))
            except BaseException as error:
                with self._lock:
                    self._found.pop(key_version, None)
                found.set_exception(error)
        return found.result()

    def close(self) -> None:
        """Remove the shards. Processes that have one mapped can still read it."""
        self._server.close()
        with self._lock:
            stores, self._stores = self._stores, {}
            self._found.clear()
        for store in stores.values():
            store.close()

    def _fetch_for_another(self, message: dict[str, Any]) -> dict[str, Any]:
        read = self.fetch(msgspec.convert(message["shard"], WantedShard))
        return {"path": str(read.path), "received_bytes": read.received_bytes}

    def _fetch(self, wanted: WantedShard) -> ReadShard:
        remote = wanted.remote
        self._server.admit(remote.token)
        self._forget_other_writers(wanted.keys)
        with self._lock:
            store = self._stores.get(remote.key)
            if store is None:
                store = self._stores[remote.key] = FileShardStore(self._run_id, keep=NUM_KEPT, root=self._root)
        copies = self._server.copies(remote.key)
        fitting = [
            version for version, copy in copies.items() if len(copy.data) == wanted.num_bytes and copy.is_complete
        ]
        base = copies[max(fitting)] if fitting else None
        download = Download(
            remote, base, name=self._name, address=self.address, timeout_s=self._timeout_s, pace=self._pace
        )
        try:
            with store.writing(remote.version, wanted.num_bytes) as shard:
                self._fill(wanted, download, shard.data)
        except BaseException as error:
            self._server.withdraw(remote.key, remote.version, f"host {self._name} could not read it: {error}")
            raise
        finally:
            self._forget_released(remote.key, store, remote.version)
        return ReadShard(shard.path, download.received_bytes)

    def _fill(self, wanted: WantedShard, download: Download, data: NDArray[np.uint8]) -> None:
        key, version = wanted.remote.key, wanted.remote.version
        copy = ShardCopy(version, data)
        self._server.offer(key, copy)
        download.run(copy)
        if checksum(data) == wanted.checksum:
            return
        logger.warning("version %d arrived damaged; reading it whole from the trainer", version)
        self._server.withdraw(key, version, f"version {version} arrived damaged at {self._name}")
        copy = ShardCopy(version, data)
        download.run(copy, from_trainer=True)
        if checksum(data) != wanted.checksum:
            raise StateDictError(
                f"version {version} from {wanted.remote.address} does not match the checksum in its manifest: it was "
                "overwritten while it was read"
            )
        self._server.offer(key, copy)

    def _forget_other_writers(self, keys: Collection[str]) -> None:
        """Remove the shards of earlier trainers."""
        with self._lock:
            gone = {key: self._stores.pop(key) for key in self._stores.keys() - set(keys)}
        for key, store in gone.items():
            for version in self._server.copies(key):
                self._server.withdraw(key, version)
            store.close()

    def _forget_released(self, key: str, store: FileShardStore, fetched: int) -> None:
        kept = store.versions
        for version in self._server.copies(key).keys() - kept - {fetched}:
            self._server.withdraw(key, version)
        with self._lock:
            self._found = {
                (of, version): found
                for (of, version), found in self._found.items()
                if of != key or version in kept | {fetched}
            }
