"""Overhead of the RDMA transport over a bare read. Part of `benchmarks/statedict.py`; also runs alone:

    python -m benchmarks.rdma [--megabytes 64] [--repeats 7]

There are two Monarch actors on this host, connected by RDMA hardware if there is any, and by Monarch's TCP fallback
otherwise. The bare read copies the writer's `RDMABuffer` to the reader's memory. The pull does the same, verifies the
checksum, and creates tensors. They take turns in the same run; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import uuid
from pathlib import Path
from statistics import median

import cloudpickle
import torch

from titan_rl.cluster.processes.process import enter_actor_process
from titan_rl.cluster.processes.remote_process import call
from titan_rl.cluster.supervision import Supervisor
from titan_rl.weights.transports.rdma import RDMATransport
from titan_rl.weights.types import Manifest

from monarch.actor import Actor, concurrent_endpoint, this_proc  # isort: skip

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actor processes cannot import a script

TENSOR_BYTES = 16 << 20


class Writer(Actor):
    def __init__(self, log_path: str, run_id: str) -> None:
        enter_actor_process(log_path)
        self._transport = RDMATransport(run_id, host="here")

    @concurrent_endpoint
    async def publish(self, num_bytes: int) -> Manifest:
        source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
        named = [(f"layers.{i}.weight", part.view(torch.float32)) for i, part in enumerate(source.split(TENSOR_BYTES))]
        return await asyncio.to_thread(self._transport.publish, 1, named)

    @concurrent_endpoint
    async def close(self) -> None:
        await asyncio.to_thread(self._transport.close)


class Reader(Actor):
    def __init__(self, log_path: str, run_id: str) -> None:
        enter_actor_process(log_path)
        self._transport = RDMATransport(run_id, host="elsewhere")

    @concurrent_endpoint
    async def bare(self, manifest: Manifest) -> float:
        return await asyncio.to_thread(self._bare, manifest)

    @concurrent_endpoint
    async def pull(self, manifest: Manifest) -> float:
        return await asyncio.to_thread(self._pull, manifest)

    def _bare(self, manifest: Manifest) -> float:
        began = time.perf_counter()
        (shard,) = manifest.shards
        shard.remote.read_into(torch.empty(shard.num_bytes, dtype=torch.uint8)).get()
        return time.perf_counter() - began

    def _pull(self, manifest: Manifest) -> float:
        began = time.perf_counter()
        assert len(list(self._transport.pull(manifest))) == len(manifest.shards[0].entries)
        return time.perf_counter() - began


async def measure(megabytes: int, repeats: int) -> None:
    supervisor = this_proc().spawn("supervisor_of_rdma", Supervisor)
    run_id = f"benchmark-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:

        async def start(name: str, actor_class: type[Actor]):
            arguments = (str(Path(folder) / f"{name}.log"), run_id)
            return await call(supervisor.spawn, name, actor_class, arguments, who="supervisor")

        try:
            writer, reader = await start("writer", Writer), await start("reader", Reader)
            manifest = await call(writer.publish, megabytes << 20, who="writer")
            times: dict[str, list[float]] = {"bare": [], "pull": []}
            for _ in range(repeats + 1):
                for name, seconds in times.items():
                    seconds.append(await call(getattr(reader, name), manifest, who="reader"))
            await call(writer.close, who="writer")
        finally:
            await call(supervisor.terminate, who="supervisor", timeout_s=30)
    bare, pull = (median(times[name][1:]) for name in ("bare", "pull"))
    size = f"{megabytes}mb"
    print(json.dumps({"name": f"rdma_pull_{size}", "value": round((megabytes << 20) / pull / 1e9, 3), "unit": "GB/s"}))
    print(json.dumps({"name": "rdma_pull_vs_bare", "value": round(bare / pull, 3), "unit": "ratio", "target": 0.9}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.megabytes, arguments.repeats))


if __name__ == "__main__":
    main()
