"""RDMA transport: weights for readers on any host, through shared memory on the writer's host and Monarch's RDMA on
others."""

from __future__ import annotations

import platform
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning

from titan_rl.core.errors import StateDictError
from titan_rl.weights.shard_files import checksum
from titan_rl.weights.shards import Buffer, assemble
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport, is_on_host
from titan_rl.weights.types import Manifest, Shard


class RDMATransport(SharedMemoryTransport):
    """`SharedMemoryTransport` whose shards other hosts can also read.

    Nothing is copied to expose a shard. A remote reader copies the whole shard and verifies its checksum. If the
    version was overwritten in the meantime, the pull fails, and the reader must pull the newest version. A reader maps
    the shards on its own host and copies the others. Without RDMA hardware, Monarch falls back to TCP, at a tenth of
    the speed of memory or less. Works only inside Monarch actors.

    Args:
        run_id: See `SharedMemoryTransport`.
        host: Name of this host. Readers with the same name share memory with the writer.
        timeout_s: Longest wait for the bytes of one shard.
    """

    def __init__(self, run_id: str, *, host: str = "", timeout_s: float = 120.0) -> None:
        super().__init__(run_id)
        self._host = host or platform.node()
        self._timeout_s = timeout_s
        self._buffers: dict[int, RDMABuffer] = {}
        self._lock = threading.Lock()

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Any]]) -> Manifest:
        """Publish a version; see `SharedMemoryTransport.publish`.

        Raises:
            StateDictError: See `SharedMemoryTransport.publish`; also if the memory cannot be exposed.
        """
        manifest = super().publish(version, named_tensors)
        self._drop_withdrawn()
        (shard,) = manifest.shards
        if not shard.num_bytes:
            return replace(manifest, shards=(replace(shard, host=self._host),))
        data = torch.from_numpy(self.bytes_of(version))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RDMATcpFallbackWarning)
                buffer = RDMABuffer(data)
        except Exception as error:
            super().release(version)
            raise StateDictError(f"version {version} cannot be exposed to other hosts: {error}") from error
        with self._lock:
            self._buffers[version] = buffer
        return replace(manifest, shards=(replace(shard, host=self._host, remote=buffer),))

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs: views of the writer's memory on its host, and verified copies on others.

        Raises:
            StateDictError: See `SharedMemoryTransport.pull`; also if the bytes did not arrive in time.
        """
        return assemble(manifest, lambda shard: self._open(shard, manifest.version))

    def _open(self, shard: Shard, version: int) -> Buffer:
        if not shard.num_bytes:
            return np.empty(0, np.uint8)
        if is_on_host(shard, self._host):
            return self.open_shard(shard)
        data = np.empty(shard.num_bytes, np.uint8)
        try:
            shard.remote.read_into(torch.from_numpy(data), timeout=int(self._timeout_s)).get()
        except Exception as error:
            raise StateDictError(f"version {version} could not be read from {shard.host}: {error}") from error
        if (found := checksum(data)) != shard.checksum:
            raise StateDictError(
                f"version {version} from {shard.host} has checksum {found:#010x}, but its manifest says "
                f"{shard.checksum:#010x}: it was overwritten while it was read"
            )
        return data

    def release(self, version: int) -> None:
        super().release(version)
        self._drop_withdrawn()

    def close(self) -> None:
        super().close()
        self._drop_withdrawn()

    def _drop_withdrawn(self) -> None:
        """Stop exposing versions that are not published."""
        with self._lock:
            gone = self._buffers.keys() - self.versions
            buffers = [self._buffers.pop(version) for version in gone]
        for buffer in buffers:
            buffer.drop().get(self._timeout_s)
