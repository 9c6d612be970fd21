"""How fast a state dict goes from one process to another, against a plain copy of the same bytes the same way.

    python -m benchmarks.statedict [--megabytes 64 256 1024 2048] [--repeats 5]

The plain copy is two `memcpy`s of every tensor through one shared mapping that both processes keep mapped: writer to
mapping, mapping to the reader's own memory. Publish and pull do the same two copies, the second one being the engine's,
and besides compute the checksum on both sides and map the segment anew. Each figure is the best of the repeats, both
kinds alternating in the same run. The optimizer waits for what is left of a publish when its gradients are there; a
generator's engine waits for the second copy, since the segment is opened in another thread. One JSON line a figure:
`name`, `value`, `unit`, and `target` where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks import rdma
from titan_rl.statedict.folder import segment_root
from titan_rl.statedict.shared_memory import SharedMemoryTransport

TENSOR_BYTES = 16 << 20  # a 2048 x 2048 float32 matrix
TARGET = 0.5


def report(name: str, value: float, unit: str, target: float | None = None) -> None:
    line: dict[str, Any] = {"name": name, "value": round(value, 4), "unit": unit}
    print(json.dumps(line if target is None else line | {"target": target}), flush=True)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def map_file(path: str, num_bytes: int) -> np.ndarray:
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)


def copy_pieces(target: np.ndarray, source: np.ndarray) -> None:
    """memcpy, tensor by tensor: no state dict is one piece of memory."""
    for at in range(0, len(source), TENSOR_BYTES):
        np.copyto(target[at : at + TENSOR_BYTES], source[at : at + TENSOR_BYTES])


def read(pipe: Connection, path: str, num_bytes: int) -> None:
    """The reading process. Answers every request with the seconds of (verification and mapping, copying)."""
    shared = map_file(path, num_bytes)
    own = torch.zeros(num_bytes, dtype=torch.uint8)
    parameters = [part.view(torch.float32) for part in own.split(TENSOR_BYTES)]
    transport = SharedMemoryTransport("benchmark")

    def load(views: Any) -> None:
        for parameter, (_, view) in zip(parameters, views, strict=True):
            np.copyto(parameter.numpy(), view.numpy())

    while (manifest := pipe.recv()) is not None:
        if manifest == "memcpy":
            pipe.send((0.0, timed(lambda: copy_pieces(own.numpy(), shared))[0]))
        else:
            verifying, views = timed(lambda manifest=manifest: transport.pull(manifest))
            copying, _ = timed(lambda views=views: load(views))
            del views
            pipe.send((verifying, copying))


def measure(megabytes: int, repeats: int) -> None:
    num_bytes = megabytes << 20
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    named = [(f"layers.{i}.weight", part.view(torch.float32)) for i, part in enumerate(source.split(TENSOR_BYTES))]
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    with (
        tempfile.NamedTemporaryFile(dir=segment_root(), prefix="benchmark-") as file,
        SharedMemoryTransport("benchmark") as transport,
    ):
        file.truncate(num_bytes)
        shared = map_file(file.name, num_bytes)
        reader = context.Process(target=read, args=(far_end, file.name, num_bytes), daemon=True)
        reader.start()

        def ask(what: Any) -> tuple[float, float]:
            pipe.send(what)
            return pipe.recv()

        memcpy: list[float] = []
        publish: list[float] = []
        verify: list[float] = []
        copy: list[float] = []
        for version in range(repeats + 3):  # the first publishes allocate both buffers; the first memcpy its mapping
            writing, _ = timed(lambda: copy_pieces(shared, source.numpy()))
            memcpy.append(writing + ask("memcpy")[1])
            publishing, manifest = timed(lambda version=version: transport.publish(version, named))
            verifying, copying = ask(manifest)
            publish.append(publishing)
            verify.append(verifying)
            copy.append(copying)
        pipe.send(None)
        reader.join(timeout=30)

    def speed(seconds: float) -> float:
        return num_bytes / seconds / 1e9

    warm = slice(3, None)
    pull = [v + c for v, c in zip(verify[warm], copy[warm], strict=True)]
    ratio = min(memcpy[warm]) / (min(publish[warm]) + min(pull))
    size = f"{megabytes}mb"
    report(f"memcpy_{size}", speed(min(memcpy[warm])), "GB/s")
    report(f"shm_publish_first_{size}", speed(publish[0]), "GB/s")
    report(f"shm_publish_{size}", speed(min(publish[warm])), "GB/s")
    report(f"shm_verify_{size}", speed(min(verify[warm])), "GB/s")
    report(f"shm_pull_{size}", speed(min(pull)), "GB/s")
    report(f"optimizer_blocked_at_most_{size}", min(publish[warm]), "s")
    report(f"generator_blocked_{size}", min(copy[warm]), "s")
    report(f"shm_publish_pull_vs_memcpy_{size}", ratio, "ratio", TARGET)
    ratios.append(ratio)


ratios: list[float] = []

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for size in arguments.megabytes:
        measure(size, arguments.repeats)
    asyncio.run(rdma.measure(256, arguments.repeats))
    report("shm_publish_pull_vs_memcpy", min(ratios), "ratio", TARGET)
