"""CUDA IPC transport with host memory instead of a GPU's. `tests/gpu` covers the GPU, `test_transport_contract.py` the
behaviour common to all transports."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from weights.host_memory import HostMemory
from weights.published import PublishedVersions, assert_equal, weights
from weights.racing import race

from titan_rl.core.errors import StateDictError
from titan_rl.weights import shard_files
from titan_rl.weights.transports.cuda_ipc import CudaIPCTransport, checksum
from titan_rl.weights.types import Manifest


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


@pytest.fixture
def transport(tmp_path: Path, memory: HostMemory) -> Iterator[CudaIPCTransport]:
    transport = CudaIPCTransport("test", root=tmp_path, memory=memory)
    yield transport
    transport.close()


def begin(manifest: Manifest, memory: HostMemory) -> Iterator[tuple[str, torch.Tensor]]:
    """Begin a pull in a reader, which unpickles the manifest."""
    return CudaIPCTransport("reader", memory=memory).pull(pickle.loads(pickle.dumps(manifest)))


def test_memory_is_reused_once_nobody_reads_it(transport, memory) -> None:
    for version in range(6):
        manifest = transport.publish(version, weights(version).items())
        assert_equal(dict(begin(manifest, memory)), weights(version))
    assert len(memory.buffers) == 2


@pytest.mark.parametrize("started", [False, True])
def test_version_being_read_is_not_overwritten(transport, memory, started: bool) -> None:
    pairs = begin(transport.publish(1, weights(1).items()), memory)
    found = dict([next(pairs)]) if started else {}
    for version in range(2, 6):
        transport.publish(version, weights(version).items())
    assert memory.num_held == 3
    assert_equal(found | dict(pairs), weights(1))
    transport.publish(6, weights(6).items())
    assert memory.num_held == 2
    transport.close()
    assert memory.num_held == 0


def test_first_tensor_is_synchronized_before_it_is_yielded(transport, memory) -> None:
    pairs = begin(transport.publish(1, weights(1).items()), memory)
    next(pairs)
    assert memory.num_waits == 1
    next(pairs)  # in the loading thread, on its own stream
    assert memory.num_waits == 1


def test_reader_opens_each_buffer_once(transport, memory) -> None:
    reader = CudaIPCTransport("reader", memory=memory)
    for version in range(6):
        manifest = transport.publish(version, weights(version).items())
        assert_equal(dict(reader.pull(pickle.loads(pickle.dumps(manifest)))), weights(version))
        assert memory.num_open == min(version + 1, 2)
    reader.close()
    assert memory.num_open == 0


def test_reader_releases_the_memory_of_a_closed_writer(tmp_path, memory) -> None:
    reader = CudaIPCTransport("reader", memory=memory)
    for trainer in range(3):
        transport = CudaIPCTransport("test", root=tmp_path, memory=memory)
        for version in range(2):
            manifest = transport.publish(version, weights(10 * trainer + version).items())
            assert_equal(dict(reader.pull(manifest)), weights(10 * trainer + version))
        transport.close()
        assert memory.num_open == 2


def test_reader_releases_buffers_that_became_too_small(transport, memory) -> None:
    reader = CudaIPCTransport("reader", memory=memory)
    for version in range(8):
        assert len(dict(reader.pull(transport.publish(version, weights(version, 100 * (version + 1)).items())))) == 2
        assert memory.num_open <= 2


def test_abandoned_pull_holds_no_memory(transport, memory, tmp_path) -> None:
    for version in range(6):
        pairs = begin(transport.publish(version, weights(version).items()), memory)
        if version % 2:
            next(pairs)
        del pairs
    assert len(memory.buffers) == 2


def test_failed_check_holds_no_memory(transport, memory) -> None:
    kept: list[object] = []  # as a caller keeps an error to report it later
    for version in range(6):
        manifest = transport.publish(version, weights(version).items())
        (shard,) = manifest.shards
        with pytest.raises(StateDictError, match="checksum") as wrong_sum:
            begin(replace(manifest, shards=(replace(shard, checksum=shard.checksum ^ 1),)), memory)
        with pytest.raises(StateDictError, match="bytes") as wrong_size:
            begin(replace(manifest, shards=(replace(shard, num_bytes=shard.num_bytes + 64),)), memory)
        kept += [wrong_sum.value, wrong_size.value]
    assert len(memory.buffers) == 2


def test_out_of_memory_publish_keeps_the_last_version(transport, memory, tmp_path) -> None:
    first = transport.publish(1, weights(1).items())
    memory.room = 100
    with pytest.raises(StateDictError, match="no room for version 2"):
        transport.publish(2, weights(2).items())
    assert_equal(dict(begin(first, memory)), weights(1))
    memory.room = 1 << 40
    assert_equal(dict(begin(transport.publish(2, weights(2).items()), memory)), weights(2))
    transport.close()
    assert list(tmp_path.iterdir()) == []


def test_error_without_a_gpu_names_the_setting() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(StateDictError, match=r"set statedict\.transport to shared_memory"):
        CudaIPCTransport("test")


@given(words=st.sampled_from([0, 1, 7, 8, 9, 16, 17, 40]), seed=st.integers(0, 2**32 - 1))
def test_checksum_equals_that_of_shared_memory(words: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, words * 8, dtype=np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_rl.weights.shard_files.BLOCK_WORDS", 8)
        patch.setattr("titan_rl.weights.transports.cuda_ipc.BLOCK_WORDS", 8)
        assert checksum(torch.from_numpy(data)) == shard_files.checksum(data)


def test_readers_racing_the_writer_see_whole_versions(transport, memory) -> None:
    assert race(
        lambda version: transport.publish(version, weights(version).items()),
        lambda manifest: dict(begin(manifest, memory)),
        weights,
    )


class Sequences(PublishedVersions):
    """Any order of publishing in any size, releasing, beginning to read, and finishing or abandoning a read."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        super().__init__(CudaIPCTransport("hypothesis", memory=self.memory))
        self.reading: list[tuple[Iterator[tuple[str, torch.Tensor]], int]] = []

    @rule(size=st.integers(1, 2000))
    def publish(self, size: int) -> None:
        self.publish_next(weights(len(self.manifests), size))

    @precondition(lambda self: self.manifests)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        version = self.drawn(data)
        if version in self.available:
            self.reading.append((begin(self.manifests[version], self.memory), version))
        else:
            with pytest.raises(StateDictError):
                begin(self.manifests[version], self.memory)

    @precondition(lambda self: self.reading)
    @rule()
    def read(self) -> None:
        pairs, version = self.reading.pop(0)
        assert_equal(dict(pairs), self.contents[version])

    @precondition(lambda self: self.reading)
    @rule()
    def abandon(self) -> None:
        self.reading.pop()

    def teardown(self) -> None:
        self.transport.close()
        while self.reading:
            self.read()


TestSequences = Sequences.TestCase
