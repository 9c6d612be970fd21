"""Weights between two processes through GPU memory. Skipped where there is no GPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from titan_rl.weights.transports.cuda_ipc import CudaIPCTransport
from titan_rl.weights.types import NUM_KEPT, SlicePosition, TensorSlice

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; tests/statedict has all but the GPU's own part"
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


def test_a_writer_holds_the_versions_that_are_kept_and_nothing_beside_them() -> None:
    weight = torch.ones(4096, 8192, device="cuda")  # 128 MiB, published in half of that
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
