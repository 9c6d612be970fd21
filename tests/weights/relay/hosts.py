"""Hosts of a transport within one process, and hosts that misbehave."""

from __future__ import annotations

import pickle
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.weights.relay.delta import ChunkDelta
from titan_rl.weights.relay.server import RelayServer, RemoteShard, ask
from titan_rl.weights.relay.shard_copy import ShardCopy
from titan_rl.weights.transports.tcp import TCPTransport
from titan_rl.weights.types import Manifest


class Hosts:
    """Makes ends of a transport on hosts that are named."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ends: list[TCPTransport] = []

    def end(self, host: str, **settings: Any) -> TCPTransport:
        folder = self.root / host
        folder.mkdir(exist_ok=True)
        self._ends.append(TCPTransport("run", host=host, root=folder, **{"timeout_s": 20.0, **settings}))
        return self._ends[-1]

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def left(self) -> list[Path]:
        return list(self.root.glob("*/*"))


def arrived(manifest: Manifest) -> Manifest:
    return pickle.loads(pickle.dumps(manifest))


class OddHost:
    """Host that claims to read a version, so that the next host reads from it, and then misbehaves."""

    def __init__(self, name: str, manifest: Manifest) -> None:
        (shard,) = manifest.shards
        self.remote: RemoteShard = shard.remote
        self.server = RelayServer("127.0.0.1")
        self.server.admit(self.remote.token)
        self.copy = ShardCopy(self.remote.version, np.zeros(shard.num_bytes, np.uint8))
        self.server.offer(self.remote.key, self.copy)
        self.place(name, self.server.address)

    def place(self, name: str, address: str) -> None:
        message = {"ask": "place", "token": self.remote.token, "version": self.remote.version, "avoid": []}
        ask(self.remote.address, {**message, "host": name, "address": address})

    def sends_zeros(self) -> None:
        self.copy.complete()

    def sends_deltas(self, encoded: bytes, *, crc: int | None = None) -> None:
        for _ in range(self.copy.num_chunks):
            delta = ChunkDelta.of(self.remote.version - 1, encoded)
            self.copy.add((delta if crc is None else ChunkDelta(delta.base, encoded, crc),))

    def sends_slowly(self, data: np.ndarray, every_s: float, stop: threading.Event) -> None:
        """Send the correct bytes, a chunk every `every_s` seconds, until `stop` is set."""
        self.copy.data[:] = data
        while not stop.wait(every_s) and not self.copy.is_complete:
            self.copy.add()

    def sends_one_chunk(self) -> None:
        self.copy.add()


def silent() -> socket.socket:
    """Server that accepts connections and never answers."""
    return socket.create_server(("127.0.0.1", 0))
