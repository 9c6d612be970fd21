"""User-defined transport: files on a shared disk, laid out with titan_rl's helpers.

statedict.transport = "file_transport:FileTransport"
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.core.errors import StateDictError
from titan_rl.weights.shard_files import checksum
from titan_rl.weights.shards import assemble, fill, lay_out, size_of
from titan_rl.weights.transports.registry import TransportSpec
from titan_rl.weights.types import Manifest, Shard


class FileTransport:
    """Writes a file for each version and rank below the folder $WEIGHTS_ROOT."""

    def __init__(self, spec: TransportSpec) -> None:
        self._folder = Path(os.environ["WEIGHTS_ROOT"]) / f"{spec.run_id}-{spec.rank}"
        self._published: set[int] = set()
        self._is_writer = self._closed = False

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Any]]) -> Manifest:
        if self._closed or version in self._published:
            raise StateDictError(f"version {version} is published already, or the transport is closed")
        named = list(named_tensors)
        entries = lay_out(named)
        data = np.empty(size_of(entries), np.uint8)
        fill(data, named, entries)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._is_writer = True
        path = self._folder / str(version)
        try:
            data.tofile(path)  # readers learn of it from the manifest, once it is complete
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StateDictError(f"no room for version {version} in {self._folder}: {error}") from error
        self._published.add(version)
        return Manifest(version, (Shard(str(path), len(data), checksum(data), entries),))

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, Any]]:
        return assemble(manifest, self._open)

    def _open(self, shard: Shard) -> np.ndarray:
        try:
            data = np.fromfile(shard.location, np.uint8)
        except OSError as error:
            raise StateDictError(f"{shard.location} is gone: {error}") from error
        if len(data) != shard.num_bytes or checksum(data) != shard.checksum:
            raise StateDictError(f"{shard.location} is not what was published")
        return data

    def release(self, version: int) -> None:
        if version in self._published:
            (self._folder / str(version)).unlink()
            self._published.remove(version)

    def close(self) -> None:
        self._closed = True
        if self._is_writer:
            shutil.rmtree(self._folder, ignore_errors=True)
