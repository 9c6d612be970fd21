"""Reader of a host: one process reads for all readers of its host, and sends on to other hosts.

It owns a folder of the run by a lock that dies with it, so that another process takes its place at once. The file that
it writes there has its address; only processes of the same user can read that."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from titan_rl.core.errors import StateDictError
from titan_rl.weights.relay.download import Download, Pace, Reading, is_right
from titan_rl.weights.relay.server import RelayServer, RemoteShard
from titan_rl.weights.relay.shard_copy import ShardCopy
from titan_rl.weights.shard_files import PREFIX, ShardFile, ShardStore, shard_root
from titan_rl.weights.types import NUM_KEPT


@dataclass(frozen=True, slots=True)
class Leader:
    """The process that reads for the others, and what it wants to hear from them."""

    address: str
    token: str


class Rendezvous:
    """Args:
    run_id, root: as of `ShardStore`.
    """

    def __init__(self, run_id: str, root: Path | None = None) -> None:
        self._folder = (root or shard_root()) / f"{PREFIX}{run_id}-reader"
        self._lock: int | None = None

    def lead(self) -> bool:
        """Try to become the process that reads for its host; return whether it is.

        Raises:
            OSError: the folder cannot be made.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(self._folder, os.O_RDONLY)
        except FileNotFoundError:
            return False  # it is being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(self._folder)):
                (self._folder / "leader").unlink(missing_ok=True)  # of the process before
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
        """The process that reads for the others, if it has said so."""
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


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WantedShard:
    """A shard, and where it is had. It travels as JSON."""

    num_bytes: int
    checksum: int
    remote: RemoteShard
    keys: tuple[str, ...]  # of all shards of the version

    def as_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> WantedShard:
        given = message["remote"]
        remote = RemoteShard(str(given["address"]), str(given["key"]), int(given["version"]), str(given["token"]))
        return cls(int(message["num_bytes"]), int(message["checksum"]), remote, tuple(map(str, message["keys"])))


@dataclass(frozen=True, slots=True)
class ReadShard:
    """Location of a shard on this host."""

    path: Path
    received_bytes: int  # for it, from other hosts


class HostReader:
    """Reads each shard once, into shared memory, and lets other hosts read it meanwhile.

    Args:
        run_id, root: as of `ShardStore`.
        name: of this host, or another that no other reader has.
        interface: the address at which other hosts reach this one.
        timeout_s: longest time for a shard.

    Raises:
        StateDictError: it cannot listen there.
    """

    def __init__(self, run_id: str, root: Path | None, *, name: str, interface: str, timeout_s: float) -> None:
        self._make_store: Callable[[], ShardStore[ShardFile]] = lambda: ShardStore(
            run_id, ShardFile, keep=NUM_KEPT, root=root
        )
        self._name = name
        self._timeout_s = timeout_s
        self._pace = Pace()
        self._server = RelayServer(interface)
        self.token = secrets.token_hex(16)
        self._server.admit(self.token)
        self._server.answer("fetch", self._fetch_for_another)
        self._stores: dict[str, ShardStore[ShardFile]] = {}
        self._found: dict[tuple[str, int], Future[ReadShard]] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._server.address

    def fetch(self, wanted: WantedShard) -> ReadShard:
        """The shard on this host. Whoever asks while it is on its way waits for the same transfer.

        Raises:
            StateDictError: it could not be had, or is not what was published.
        """
        place = wanted.remote.key, wanted.remote.version
        with self._lock:
            found = self._found.get(place)
            is_mine = found is None
            if found is None:
                found = self._found[place] = Future()
        if is_mine:
            try:
                found.set_result(self._fetch(wanted))
            except BaseException as error:
                with self._lock:
                    self._found.pop(place, None)
                found.set_exception(error)
        return found.result()

    def close(self) -> None:
        """Remove what was read; who has it mapped keeps it."""
        self._server.close()
        with self._lock:
            stores, self._stores = self._stores, {}
            self._found.clear()
        for store in stores.values():
            store.close()

    def _fetch_for_another(self, message: dict[str, Any]) -> dict[str, Any]:
        read = self.fetch(WantedShard.of_message(message["shard"]))
        return {"path": str(read.path), "received_bytes": read.received_bytes}

    def _fetch(self, wanted: WantedShard) -> ReadShard:
        remote = wanted.remote
        self._server.admit(remote.token)
        self._forget_writers_but(wanted.keys)
        with self._lock:
            store = self._stores.setdefault(remote.key, self._make_store())
        copies = self._server.copies(remote.key)
        fitting = [version for version, copy in copies.items() if len(copy.data) == wanted.num_bytes and copy.is_whole]
        base = copies[max(fitting)] if fitting else None
        download = Download(Reading(remote, self._name, self.address, self._timeout_s, self._pace), base)
        try:
            fill = partial(self._fill, wanted, download)
            path, _ = store.write(remote.version, wanted.num_bytes, fill)
        except BaseException as error:
            self._server.withdraw(remote.key, remote.version, f"host {self._name} could not read it: {error}")
            raise
        finally:
            self._forget_released(remote.key, store, remote.version)
        return ReadShard(path, download.received_bytes)

    def _fill(self, wanted: WantedShard, download: Download, shard: ShardFile) -> None:
        key, version = wanted.remote.key, wanted.remote.version
        copy = ShardCopy(version, shard.data)
        self._server.offer(key, copy)
        download.run(copy)
        if is_right(copy, wanted.checksum):
            return
        logger.warning("version %d arrived damaged, and is read whole from the trainer", version)
        self._server.withdraw(key, version, f"version {version} arrived damaged at {self._name}")
        copy = ShardCopy(version, shard.data)
        download.run_whole(copy)
        if not is_right(copy, wanted.checksum):
            raise StateDictError(
                f"version {version} from {wanted.remote.address} has another checksum than its manifest says: it was "
                "overwritten while it was read"
            )
        self._server.offer(key, copy)

    def _forget_writers_but(self, keys: Collection[str]) -> None:
        """Remove the shards of earlier trainers."""
        with self._lock:
            gone = {key: self._stores.pop(key) for key in self._stores.keys() - set(keys)}
        for key, store in gone.items():
            for version in self._server.copies(key):
                self._server.withdraw(key, version)
            store.close()

    def _forget_released(self, key: str, store: ShardStore[ShardFile], fetched: int) -> None:
        kept = store.versions
        for version in self._server.copies(key).keys() - kept - {fetched}:
            self._server.withdraw(key, version)
        with self._lock:
            gone = [place for place in self._found if place[0] == key and place[1] not in kept | {fetched}]
            for place in gone:
                del self._found[place]
