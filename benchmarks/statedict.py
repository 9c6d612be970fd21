"""Speed of transferring a state dict between processes, compared with a plain copy of the same bytes.

    python -m benchmarks.statedict [--megabytes 64 256 1024 2048] [--rounds 12]

The plain copy is two `memcpy`s of every tensor, each by one thread, through a shared mapping that both processes keep
open: from the writer to the mapping, and from the mapping to the reader's memory. Publish and pull make the same two
copies (the engine makes the second, here also by one thread) and compute the checksum on both sides, in as many threads
as the process has cores, up to four. A round does both, in both directions, and gives one ratio; figures are medians
over the rounds, with quartiles. The optimizer waits for the rest of a publish when its gradients are ready.
A generator's engine waits for the second copy only, since another thread opens the shard.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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
from benchmarks.paired import Spread, ratio, report
from titan_rl.weights.shard_files import shard_root
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

TENSOR_BYTES = 16 << 20  # a 2048 x 2048 float32 matrix
TARGET = 0.8


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def map_file(path: str, num_bytes: int) -> np.ndarray:
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)


def copy_pieces(target: np.ndarray, source: np.ndarray) -> None:
    """Copy tensor by tensor, because a state dict is not contiguous in memory."""
    for at in range(0, len(source), TENSOR_BYTES):
        np.copyto(target[at : at + TENSOR_BYTES], source[at : at + TENSOR_BYTES])


def read(pipe: Connection, path: str, num_bytes: int) -> None:
    """Run the reading process, which answers every request with the seconds of (verification and mapping, copying)."""
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


def measure(megabytes: int, rounds: int) -> Spread:
    num_bytes = megabytes << 20
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    named = [(f"layers.{i}.weight", part.view(torch.float32)) for i, part in enumerate(source.split(TENSOR_BYTES))]
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    with (
        tempfile.NamedTemporaryFile(dir=shard_root(), prefix="benchmark-") as file,
        SharedMemoryTransport("benchmark") as transport,
    ):
        file.truncate(num_bytes)
        shared = map_file(file.name, num_bytes)
        reader = context.Process(target=read, args=(far_end, file.name, num_bytes), daemon=True)
        reader.start()

        def ask(what: Any) -> tuple[float, float]:
            pipe.send(what)
            return pipe.recv()

        def copied() -> float:
            return timed(lambda: copy_pieces(shared, source.numpy()))[0] + ask("memcpy")[1]

        def synced() -> tuple[float, float, float]:
            publishing, manifest = timed(lambda: transport.publish(next(versions), named))
            return publishing, *ask(manifest)

        versions = itertools.count()
        first_publish = synced()[0]
        for _ in range(2):  # both buffers, and the mapping of the plain copy, are allocated
            synced()
            copied()
        measured: list[dict[str, float]] = []
        for _ in range(rounds):
            first, there, back, last = copied(), synced(), synced(), copied()
            publish, verify, copy = ((a + b) / 2 for a, b in zip(there, back, strict=True))
            memcpy = (first + last) / 2
            measured.append(
                {"memcpy": memcpy, "publish": publish, "verify": verify, "copy": copy, "both": publish + verify + copy}
            )
        pipe.send(None)
        reader.join(timeout=30)

    def speed(kind: str) -> Spread:
        return Spread([num_bytes / values[kind] / 1e9 for values in measured])

    size = f"{megabytes}mb"
    report(f"memcpy_{size}", speed("memcpy"), "GB/s")
    report(f"shm_publish_first_{size}", num_bytes / first_publish / 1e9, "GB/s")
    report(f"shm_publish_{size}", speed("publish"), "GB/s")
    report(f"shm_verify_{size}", speed("verify"), "GB/s")
    report(f"optimizer_blocked_at_most_{size}", Spread([values["publish"] for values in measured]), "s")
    report(f"generator_blocked_{size}", Spread([values["copy"] for values in measured]), "s")
    figure = ratio(measured, "memcpy", "both")
    report(f"shm_publish_pull_vs_memcpy_{size}", figure, "ratio", TARGET)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = [measure(size, arguments.rounds) for size in arguments.megabytes]
    asyncio.run(rdma.measure(256, arguments.rounds))
    report("shm_publish_pull_vs_memcpy", min(figures, key=lambda figure: figure.median), "ratio", TARGET)
