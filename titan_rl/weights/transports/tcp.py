"""TCP transport: weights for generators on several hosts, through shared memory on each host and one TCP transfer of
each version between hosts."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from os import getpid
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_rl.core.errors import StateDictError
from titan_rl.weights.relay.host_reader import HostReader, Leader, ReadShard, Rendezvous, WantedShard
from titan_rl.weights.relay.origin import ShardOrigin
from titan_rl.weights.relay.server import ConnectionLostError, ask
from titan_rl.weights.shards import Buffer, assemble
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport, is_on_host
from titan_rl.weights.types import Manifest, Shard, TensorEntry

RETRY_S = 0.02  # pause between two attempts to find the process that reads for this host
MAX_SILENCES = 2  # number of unanswered requests after which this process reads for itself


class TCPTransport(SharedMemoryTransport):
    """`SharedMemoryTransport` whose shards hosts can also read from each other.

    Readers on the host of a trainer rank map the file that it wrote. On another host the first process that pulls
    becomes the reader of its host: it downloads each version once into shared memory, where the others map it, and
    sends it on to the next host while it arrives. If it ends, another process takes over. A version that differs little
    from the previous one is sent as a delta. Every process verifies the whole version before it yields a tensor.

    Args:
        run_id, root: See `SharedMemoryTransport`.
        host: Name of this host. Readers with the same name share memory with the writer.
        interface: Address at which other hosts reach this one. Nothing listens there before the first use.
        timeout_s: Longest wait for the bytes of one shard.
        fanout, anchor_interval: See `ShardOrigin`.

    Example:

        transport = TCPTransport("run-7", host="a", interface="10.0.0.1")
        manifest = transport.publish(1, model.state_dict().items())
        ...  # on another host, given the manifest
        transport = TCPTransport("run-7", host="b", interface="10.0.0.2")
        engine.load_state_dict(transport.pull(manifest), version=1)

    Raises:
        ValueError: `run_id` is not a plain file name.
    """

    def __init__(
        self,
        run_id: str,
        *,
        host: str = "",
        interface: str = "127.0.0.1",
        root: Path | None = None,
        timeout_s: float = 120.0,
        fanout: int = 1,
        anchor_interval: int = 16,
    ) -> None:
        super().__init__(run_id, root=root)
        self._run_id = run_id
        self._root = root
        self._host = host or platform.node()
        self._interface = interface
        self._timeout_s = timeout_s
        self._make_origin = lambda: ShardOrigin(interface, fanout=fanout, anchor_interval=anchor_interval)
        self._origin: ShardOrigin | None = None
        self._rendezvous = Rendezvous(run_id, root)
        self._host_reader: HostReader | None = None  # set if this process reads for its host, or had to for itself
        self._lock = threading.Lock()
        self._figures: Mapping[str, float] = {}

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Any]]) -> Manifest:
        """Publish a version; see `SharedMemoryTransport.publish`.

        Raises:
            StateDictError: See `SharedMemoryTransport.publish`; also if `interface` is not an address of this host.
        """
        if self._origin is not None:
            self._origin.settle()
        manifest = super().publish(version, named_tensors)
        (shard,) = manifest.shards
        try:
            if self._origin is None:
                self._origin = self._make_origin()
            self._origin.keep(self.versions)
            found = self._origin.offer(version, self.bytes_of(version), _word(shard.entries))
        except BaseException:
            super().release(version)
            raise
        return replace(manifest, shards=(replace(shard, host=self._host, remote=found),))

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs that view this host's shared memory.

        Raises:
            StateDictError: See `SharedMemoryTransport.pull`; also if the bytes did not arrive in time.
        """
        remote = [shard for shard in manifest.shards if shard.num_bytes and not is_on_host(shard, self._host)]
        read: dict[str, ReadShard] = {}
        keys = tuple(shard.remote.key for shard in manifest.shards if shard.remote is not None)
        if remote:
            with ThreadPoolExecutor(len(remote), thread_name_prefix="fetch weights") as threads:
                found = threads.map(lambda shard: self._fetch(shard, keys), remote)
                read = dict(zip((shard.location for shard in remote), found, strict=True))
        self._note(remote, read)

        def open_shard(shard: Shard) -> Buffer:
            if not shard.num_bytes:
                return np.empty(0, np.uint8)
            here = read.get(shard.location)
            return self.open_shard(shard if here is None else replace(shard, location=str(here.path)))

        return assemble(manifest, open_shard)

    def pull_figures(self) -> Mapping[str, float]:
        """Figures of the last pull: `received_bytes`, the bytes that this host received for the version, and
        `received_share`, their share of the version's bytes."""
        return self._figures

    @property
    def sent_bytes(self) -> int:
        """Bytes of published versions that this end has sent to other hosts."""
        return 0 if self._origin is None else self._origin.sent_bytes

    def release(self, version: int) -> None:
        """Withdraw a version. Its memory is not written to before the next `publish`, because a delta may need it."""
        super().release(version)
        if self._origin is not None:
            self._origin.keep(self.versions)

    def close(self) -> None:
        if self._origin is not None:
            self._origin.close()
        super().close()
        with self._lock:
            if self._host_reader is not None:
                self._host_reader.close()
                self._host_reader = None
            self._rendezvous.leave()

    def _note(self, remote: Sequence[Shard], read: Mapping[str, ReadShard]) -> None:
        received, total = sum(one.received_bytes for one in read.values()), sum(shard.num_bytes for shard in remote)
        self._figures = {"received_bytes": received, "received_share": received / total} if total else {}

    def _fetch(self, shard: Shard, keys: tuple[str, ...]) -> ReadShard:
        """Make the process that reads for this host download the shard."""
        wanted = WantedShard(shard.num_bytes, shard.checksum, shard.remote, keys)
        deadline = time.monotonic() + self._timeout_s
        silences = 0
        while True:
            if (reader := self._own_reader(silences >= MAX_SILENCES)) is not None:
                return reader.fetch(wanted)
            if (leader := self._rendezvous.leader()) is not None:
                try:
                    return _ask(leader, wanted)
                except ConnectionLostError as error:
                    silences += not isinstance(error.__cause__, ConnectionRefusedError)
            if time.monotonic() > deadline:
                raise StateDictError(
                    f"no process on host {self._host} has read version {shard.remote.version} in {self._timeout_s:g} s"
                )
            time.sleep(RETRY_S)

    def _own_reader(self, alone: bool) -> HostReader | None:
        with self._lock:
            if self._host_reader is None:
                try:
                    leads = self._rendezvous.lead()
                except OSError as error:
                    raise StateDictError(f"weights cannot be read into shared memory: {error}") from error
                if leads or alone:
                    name = self._host if leads else f"{self._host}, process {getpid()}"
                    self._host_reader = HostReader(
                        self._run_id, self._root, name=name, interface=self._interface, timeout_s=self._timeout_s
                    )
                    if leads:
                        self._rendezvous.announce(Leader(self._host_reader.address, self._host_reader.token))
            return self._host_reader


def _ask(leader: Leader, wanted: WantedShard) -> ReadShard:
    answer = ask(leader.address, {"ask": "fetch", "token": leader.token, "shard": asdict(wanted)})
    return ReadShard(Path(str(answer["path"])), int(answer["received_bytes"]))


def _word(entries: Sequence[TensorEntry]) -> int:
    """Size in bytes of most of the numbers: 2 or 4."""
    small = sum(entry.num_bytes for entry in entries if entry.dtype in ("bfloat16", "float16"))
    return 2 if 2 * small > sum(entry.num_bytes for entry in entries) else 4
