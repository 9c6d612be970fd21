"""Transport contract of the library's transports and of a user-defined one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from weights.host_memory import HostMemory

from titan_rl.testing.transport_contract import TransportContract
from titan_rl.weights.transports.cuda_ipc import CudaIPCTransport
from titan_rl.weights.transports.registry import TransportSpec, make_transport
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.transports.tcp import TCPTransport
from titan_rl.weights.types import Manifest, StateDictTransport


class InAFolder(TransportContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def left(self) -> Sequence[object]:
        return list(self.path.iterdir())


class TestSharedMemory(InAFolder):
    def make(self, rank: int) -> StateDictTransport:
        return SharedMemoryTransport(f"run-{rank}", root=self.path)


class TestCudaIPC(InAFolder):
    """With host memory instead of a GPU's."""

    @pytest.fixture(autouse=True)
    def memory(self) -> None:
        self.gpu = HostMemory()

    def make(self, rank: int) -> StateDictTransport:
        return CudaIPCTransport(f"run-{rank}", root=self.path, memory=self.gpu)

    def left(self) -> Sequence[object]:
        return [*super().left(), *range(self.gpu.num_held)]

    def corrupt(self, manifest: Manifest) -> None:
        self.gpu.open(manifest.shards[0].remote.handle)[0] ^= 16


class TestUserDefinedTransport(InAFolder):
    @pytest.fixture(autouse=True)
    def root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEIGHTS_ROOT", str(self.path))

    def make(self, rank: int) -> StateDictTransport:
        return make_transport("weights.file_transport:FileTransport", TransportSpec("run-7", rank=rank))


class TestTCP(InAFolder):
    """Readers on the writer's host."""

    def make(self, rank: int) -> StateDictTransport:
        return TCPTransport(f"run-{rank}", root=self.path)


class TestTCPBetweenHosts(InAFolder):
    """Each end on its own host, where an open end keeps the versions it has read."""

    @pytest.fixture(autouse=True)
    def open_ends(self) -> None:
        self.ends: list[OnItsHost] = []

    def make(self, rank: int) -> StateDictTransport:
        root = self.path / str(len(self.ends))
        root.mkdir()
        self.ends.append(OnItsHost(f"run-{rank}", host=root.name, root=root))
        return self.ends[-1]

    def left(self) -> Sequence[object]:
        return [
            left for end in self.ends if end.is_closed for left in (self.path / str(self.ends.index(end))).iterdir()
        ]


class OnItsHost(TCPTransport):
    is_closed = False

    def close(self) -> None:
        super().close()
        self.is_closed = True
