"""Weight transfer between two processes through GPU memory. Skipped without a GPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import torch

from titan_rl.core.errors import StateDictError
from titan_rl.weights.transports.cuda_ipc import CudaIPCTransport
from titan_rl.weights.types import NUM_KEPT, Manifest, SlicePosition, TensorSlice

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; tests/weights covers the rest of this transport"
)

READER = """
import pickle, sys, torch
from titan_rl.weights.transports.cuda_ipc import CudaIPCTransport
from titan_rl.weights.types import NUM_KEPT, SlicePosition, TensorSlice
transport = CudaIPCTransport("reader")
while True:
    try:
        manifest = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    found = {name: (tensor.device.type, tensor.double().sum().item()) for name, tensor in transport.pull(manifest)}
    pickle.dump(found, sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""

SLOW_READER = """
import pickle, sys, torch
from titan_rl.weights.transports.cuda_ipc import CudaIPCTransport

def answer(value):
    pickle.dump(value, sys.stdout.buffer)
    sys.stdout.buffer.flush()

transport = CudaIPCTransport("slow")
pairs = transport.pull(pickle.load(sys.stdin.buffer))
name, tensor = next(pairs)
answer(name)
later = pickle.load(sys.stdin.buffer)  # sent once the writer has moved on
answer({name: tensor.unique().tolist()} | {name: tensor.unique().tolist() for name, tensor in pairs})
answer({name: tensor.unique().tolist() for name, tensor in transport.pull(later)})
sys.stdin.buffer.read()
"""

WRITER = """
import pickle, sys, torch
from titan_rl.weights.transports.cuda_ipc import CudaIPCTransport
transport = CudaIPCTransport("writer")
torch.ones(1, device="cuda")
pickle.dump("ready", sys.stdout.buffer)
sys.stdout.buffer.flush()
while True:
    try:
        version, num_tensors, size = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    named = ((f"w{index}", torch.full((size,), float(version), device="cuda")) for index in range(num_tensors))
    pickle.dump(transport.publish(version, named), sys.stdout.buffer)
    torch.cuda.empty_cache()
    sys.stdout.buffer.flush()
"""

Child = subprocess.Popen[bytes]


@contextmanager
def child(code: str) -> Iterator[Child]:
    """Run a process that ends with the block."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        try:
            yield process
        finally:
            process.kill()


def send(process: Child, value: Any) -> None:
    assert process.stdin is not None
    pickle.dump(value, process.stdin)
    process.stdin.flush()


def receive(process: Child) -> Any:
    """Return the next answer.

    Raises:
        EOFError: The process has ended.
    """
    assert process.stdout is not None
    return pickle.load(process.stdout)


def tensors(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield "large", torch.full((1 << 20,), float(version), device="cuda")
    yield "half", torch.full((3, 5), float(version), dtype=torch.bfloat16, device="cuda").t()
    yield "host", torch.full((7,), float(version))


@pytest.mark.parametrize("gpu", ["same", "another"])
def test_another_process_reads_each_version(gpu: str) -> None:
    if gpu == "another" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible[gpu == "another"]}
    transport = CudaIPCTransport("writer")
    command = [sys.executable, "-c", READER]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for version in range(1, 6):
            pickle.dump(transport.publish(version, tensors(version)), reader.stdin)
            reader.stdin.flush()
            found = pickle.load(reader.stdout)
            assert found == {
                "large": ("cuda", float(version << 20)),
                "half": ("cuda", 15.0 * version),
                "host": ("cuda", 7.0 * version),
            }
        reader.stdin.close()
        assert reader.wait(60) == 0
    transport.close()


def test_writer_memory_holds_only_the_kept_versions() -> None:
    weight = torch.ones(4096, 8192, device="cuda")  # 128 MiB, published as bfloat16 in half of that
    slices = [(f"w{index}", TensorSlice(weight, SlicePosition((0, 0), (4096, 8192)), "bfloat16")) for index in range(4)]
    version_bytes = 4 * weight.nbytes // 2
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    transport = CudaIPCTransport("measured")
    for version in range(5):
        transport.publish(version, iter(slices))
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    transport.close()
    print(f"cuda_ipc holds {held / version_bytes:.2f} versions, and at most {peak / version_bytes:.2f}")
    assert held <= NUM_KEPT * version_bytes * 1.01
    assert peak <= NUM_KEPT * version_bytes * 1.05


def test_slow_reader_gets_its_version_and_keeps_no_memory() -> None:
    size = 16 << 20  # floats: 64 MiB a tensor
    weights = [torch.empty(size, device="cuda") for _ in range(3)]
    version_bytes = sum(weight.nbytes for weight in weights)
    transport = CudaIPCTransport("hurried")

    def publish(version: int) -> Manifest:
        for weight in weights:  # as an optimizer does, in place
            weight.fill_(version)
        return transport.publish(version, ((f"w{index}", weight) for index, weight in enumerate(weights)))

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    last = NUM_KEPT + 3
    with child(SLOW_READER) as reader:
        send(reader, publish(0))
        assert receive(reader) == "w0", "it has read the first tensor, and waits"
        for version in range(1, last):
            publish(version)
        send(reader, publish(last))
        assert receive(reader) == {f"w{index}": [0.0] for index in range(3)}
        assert receive(reader) == {f"w{index}": [float(last)] for index in range(3)}
        publish(last + 1)  # collects memory that no reader holds any more
        torch.cuda.ipc_collect()
        held = torch.cuda.memory_allocated() - before
        assert held <= NUM_KEPT * version_bytes * 1.01, "also while the reader lives"
    transport.close()


def test_reader_releases_a_dead_writers_memory_for_the_next() -> None:
    num_tensors, size = 4, 64 << 20  # floats: 256 MiB a tensor, 1 GiB a version; more than a CUDA context
    version_bytes = 4 * num_tensors * size
    if torch.cuda.mem_get_info()[0] < 8 * version_bytes:
        pytest.skip("needs 8 GiB of GPU memory")
    transport = CudaIPCTransport("survivor")

    def values(pairs: Iterator[tuple[str, torch.Tensor]]) -> list[list[float]]:
        return [tensor.unique().tolist() for _, tensor in pairs]

    with child(WRITER) as doomed, child(WRITER) as successor:
        assert [receive(doomed), receive(successor)] == ["ready", "ready"]
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        manifests: list[Manifest] = []
        for version in (1, 2):
            send(doomed, (version, num_tensors, size))
            manifests.append(receive(doomed))
        assert values(transport.pull(manifests[0])) == [[1.0]] * num_tensors
        begun = transport.pull(manifests[1])
        found = values(islice(begun, 1))
        doomed.kill()
        doomed.wait(60)
        try:
            found += values(begun)
        except StateDictError:
            found = [[2.0]] * num_tensors  # rejected as a whole: no wrong value was read
        assert found == [[2.0]] * num_tensors
        send(successor, (3, num_tensors, size))
        assert values(transport.pull(receive(successor))) == [[3.0]] * num_tensors
        torch.cuda.empty_cache()
        assert free - torch.cuda.mem_get_info()[0] < 1.5 * version_bytes, "only the successor's version is held"
    transport.close()
