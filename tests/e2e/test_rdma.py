"""Weights read over the network by Monarch's RDMA in its TCP fallback, by readers that claim another host."""

import asyncio
import math
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest
import pytest_asyncio

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import torch

from titan_rl.cluster.processes.process import enter_actor_process
from titan_rl.cluster.processes.remote_process import call
from titan_rl.cluster.supervision import Supervisor
from titan_rl.core.errors import StateDictError
from titan_rl.weights.manifest import join
from titan_rl.weights.transports.rdma import RDMATransport
from titan_rl.weights.types import Manifest, SlicePosition, TensorSlice

from monarch.actor import Actor, concurrent_endpoint, this_proc  # isort: skip

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actor processes cannot import a test module

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 300
SHAPES = {"a.weight": (300, 500), "b.bias": (7,), "c.weight": (64, 64)}


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.arange(math.prod(shape)).view(shape) + float(version) for name, shape in SHAPES.items()}


class Writer(Actor):
    def __init__(self, log_path: str, host: str) -> None:
        enter_actor_process(log_path)
        self._host = host

    @concurrent_endpoint
    async def open(self, run_id: str) -> None:
        self._transport = RDMATransport(run_id, host=self._host)

    @concurrent_endpoint
    async def publish(self, version: int) -> Manifest:
        return await asyncio.to_thread(self._transport.publish, version, tensors(version).items())

    @concurrent_endpoint
    async def publish_share(self, version: int, rank: int, size: int) -> Manifest:
        """Publish an even share of the rows of each matrix. Rank 0 also publishes the other tensors whole."""

        def share(tensor: torch.Tensor) -> TensorSlice:
            rows = len(tensor) // size if tensor.dim() > 1 else len(tensor) * (not rank)
            return TensorSlice(
                tensor[rank * rows : (rank + 1) * rows],
                SlicePosition((rank * rows, *[0] * (tensor.dim() - 1)), tensor.shape),
            )

        shares = [(name, share(tensor)) for name, tensor in tensors(version).items()]
        return await asyncio.to_thread(self._transport.publish, version, shares)

    @concurrent_endpoint
    async def close(self) -> None:
        await asyncio.to_thread(self._transport.close)


class Reader(Actor):
    def __init__(self, log_path: str, host: str) -> None:
        enter_actor_process(log_path)
        self._host = host

    @concurrent_endpoint
    async def open(self, run_id: str) -> None:
        self._transport = RDMATransport(run_id, host=self._host)

    @concurrent_endpoint
    async def pull(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        pairs = await asyncio.to_thread(self._transport.pull, manifest)
        return {name: tensor.clone() for name, tensor in pairs}


@dataclass
class Stage:
    """Writers and readers by their hosts. All are on this one, and only claim to be on others."""

    writers: dict[str, Any]
    readers: dict[str, Any]

    async def open(self) -> None:
        """Begin a run: all open their transports."""
        run_id = f"rdma-{uuid.uuid4().hex[:8]}"
        for each in (*self.writers.values(), *self.readers.values()):
            await call(each.open, run_id, who="process", timeout_s=LIMIT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    supervisor, logs = this_proc().spawn("supervisor_of_rdma", Supervisor), tmp_path_factory.mktemp("logs")

    async def start(actor_class: Any, host: str) -> Any:
        name = f"{actor_class.__name__.lower()}-{host}"
        arguments = (str(logs / f"{name}.log"), host)
        return await call(supervisor.spawn, name, actor_class, arguments, who="supervisor")

    try:
        yield Stage(
            {host: await start(Writer, host) for host in ("here", "there")},
            {host: await start(Reader, host) for host in ("here", "elsewhere")},
        )
    finally:
        await call(supervisor.terminate, who="supervisor", timeout_s=240)


async def test_local_and_remote_readers_get_complete_versions(stage: Stage) -> None:
    await stage.open()
    writer = stage.writers["here"]
    manifests = []
    for version in range(4):
        manifests.append(await call(writer.publish, version, who="writer", timeout_s=LIMIT_S))
        for reader in stage.readers.values():
            found = await call(reader.pull, manifests[-1], who="reader", timeout_s=LIMIT_S)
            assert found.keys() == SHAPES.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors(version).items())
    # Two versions are kept: the memory of the oldest was overwritten and its buffer dropped.
    for reader in stage.readers.values():
        with pytest.raises(StateDictError, match=r"version 0|released|cannot be opened"):
            await call(reader.pull, manifests[0], who="reader", timeout_s=LIMIT_S)
    await call(writer.close, who="writer", timeout_s=LIMIT_S)


async def test_version_sharded_over_local_and_remote_hosts(stage: Stage) -> None:
    await stage.open()
    here, there = stage.writers.values()
    for version in (1, 2):
        manifests = [
            await call(writer.publish_share, version, rank, 2, who="writer", timeout_s=LIMIT_S)
            for rank, writer in enumerate((here, there))
        ]
        for reader in stage.readers.values():
            found = await call(reader.pull, join(manifests), who="reader", timeout_s=LIMIT_S)
            assert list(found) == list(SHAPES)
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors(version).items())
    await call(there.close, who="writer", timeout_s=LIMIT_S)
    for reader in stage.readers.values():
        with pytest.raises(StateDictError, match="version 2 could not be read from there"):
            await call(reader.pull, join(manifests), who="reader", timeout_s=LIMIT_S)
    await call(here.close, who="writer", timeout_s=LIMIT_S)
