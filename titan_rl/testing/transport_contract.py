"""Contract between trainer, generators and transports, as pytest tests.

Example of a complete test file:

    class TestMyTransport(TransportContract):
        @pytest.fixture(autouse=True)
        def folder(self, tmp_path):
            self.path = tmp_path

        def make(self, rank):
            return my_transports.FileTransport(TransportSpec(f"{self.path}/run-7", rank=rank))

        def left(self):
            return list(self.path.iterdir())
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from titan_rl.core.errors import StateDictError
from titan_rl.weights.manifest import join
from titan_rl.weights.types import NUM_KEPT, HoldingTransport, Manifest, SlicePosition, StateDictTransport, TensorSlice

Ends = Callable[..., StateDictTransport]

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool")


def arrived(manifest: Manifest) -> Manifest:
    """Return the manifest as another process receives it."""
    return pickle.loads(pickle.dumps(manifest))


def read(transport: StateDictTransport, manifest: Manifest) -> dict[str, Any]:
    """Return copies of the tensors by name, which do not share the transport's memory."""
    return {name: tensor.clone() for name, tensor in transport.pull(arrived(manifest))}


def refused(transport: StateDictTransport, manifest: Manifest) -> None:
    """Check that a pull fails before it yields a tensor."""
    with pytest.raises(StateDictError):
        next(iter(transport.pull(arrived(manifest))))


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].cpu().equal(tensor.detach().cpu()), name


class TransportContract:
    """Tests of a transport that keeps `NUM_KEPT` versions."""

    def make(self, rank: int) -> StateDictTransport:
        """Make an end of a run's transport: for a rank of the trainer, or for a reader."""
        raise NotImplementedError

    def left(self) -> Sequence[object]:
        """Return leftovers of the run outside the memory of its processes, such as files."""
        raise NotImplementedError

    def corrupt(self, manifest: Manifest) -> None:
        """Change one byte of a version. By default in the file at the first shard's location."""
        with open(manifest.shards[0].location, "r+b") as file:
            byte = file.read(1)[0]
            file.seek(0)
            file.write(bytes([byte ^ 16]))

    def weights(self, version: int) -> dict[str, Any]:
        import torch

        return {"a": torch.full((1000,), float(version)), "b": torch.arange(6.0).reshape(2, 3) + version}

    @pytest.fixture
    def end(self) -> Iterator[Ends]:
        """Make ends of the transport. At the end of the test all are closed, and nothing may be left."""
        made: list[StateDictTransport] = []

        def make(rank: int = 0) -> StateDictTransport:
            made.append(self.make(rank))
            return made[-1]

        yield make
        for transport in made:
            transport.close()
        assert not self.left()

    def test_implements_the_transport_protocol(self, end: Ends) -> None:
        assert isinstance(end(), StateDictTransport)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_names_values_dtypes_and_shapes_are_preserved(self, end: Ends, dtype: str) -> None:
        import torch

        of: Any = getattr(torch, dtype)
        tensors = {
            "z": torch.randint(0, 2, (3, 5)).to(of),
            "transposed": torch.randint(0, 2, (3, 5)).to(of).t(),
            "scalar": torch.tensor(1).to(of),
            "empty": torch.empty(0, 4, dtype=of),
            "a": torch.ones(7, dtype=of),
        }
        same(read(end(), end().publish(1, tensors.items())), tensors)

    def test_parameters_are_published_from_an_iterator(self, end: Ends) -> None:
        import torch

        model = torch.nn.Linear(3, 2)
        manifest = end().publish(1, ((name, parameter) for name, parameter in model.named_parameters()))
        same(read(end(), manifest), dict(model.state_dict()))

    def test_empty_version_can_be_published(self, end: Ends) -> None:
        assert read(end(), end().publish(1, [])) == {}

    def test_manifest_has_the_version(self, end: Ends) -> None:
        assert arrived(end().publish(3, self.weights(3).items())).version == 3

    def test_readers_can_pull_concurrently_and_repeatedly(self, end: Ends) -> None:
        manifest = end().publish(1, self.weights(1).items())
        readers = [end() for _ in range(3)]
        with ThreadPoolExecutor(len(readers)) as threads:
            for found in threads.map(lambda reader: read(reader, manifest), [*readers, *readers]):
                same(found, self.weights(1))

    def test_newest_versions_stay_readable(self, end: Ends) -> None:
        writer, reader = end(), end()
        for version in range(NUM_KEPT):
            writer.publish(version, self.weights(version).items())
        manifests = [writer.publish(v, self.weights(v).items()) for v in range(NUM_KEPT, 2 * NUM_KEPT)]
        for manifest in reversed(manifests):
            same(read(reader, manifest), self.weights(manifest.version))

    def test_later_versions_may_have_more_and_larger_tensors(self, end: Ends) -> None:
        import torch

        writer, reader = end(), end()
        for version in range(2 * NUM_KEPT):
            tensors = {f"t{index}": torch.full((10**version,), float(index)) for index in range(version + 1)}
            same(read(reader, writer.publish(version, tensors.items())), tensors)
            writer.release(version - 1)

    def test_released_version_is_gone_and_others_stay(self, end: Ends) -> None:
        writer, reader = end(), end()
        first, second = (writer.publish(version, self.weights(version).items()) for version in (1, 2))
        for version in (1, 1, 99):
            writer.release(version)
        refused(reader, first)
        same(read(reader, second), self.weights(2))

    def test_held_version_stays_readable_until_released(self, end: Ends) -> None:
        writer, reader = end(), end()
        if not isinstance(writer, HoldingTransport):
            pytest.skip("the transport holds no version")
        manifests = {1: writer.publish(1, self.weights(1).items())}
        writer.hold(1)
        for version in range(2, 2 + 2 * NUM_KEPT):
            manifests[version] = writer.publish(version, self.weights(version).items())
            for kept in (1, version, max(2, version - NUM_KEPT + 1)):
                same(read(reader, manifests[kept]), self.weights(kept))
        writer.hold(None)
        for version in range(100, 100 + NUM_KEPT):
            newest = writer.publish(version, self.weights(version).items())
            same(read(reader, newest), self.weights(version))
        refused(end(), manifests[1])

    def test_pulled_tensors_stay_unchanged(self, end: Ends) -> None:
        writer, reader = end(), end()
        held = dict(reader.pull(arrived(writer.publish(1, self.weights(1).items()))))
        writer.release(1)
        for version in range(2, 2 + 2 * NUM_KEPT):
            writer.publish(version, self.weights(version).items())
            writer.release(version)
        same(held, self.weights(1))

    def test_reader_that_stops_early_does_not_block_others(self, end: Ends) -> None:
        writer, reader = end(), end()
        for version in range(2 * NUM_KEPT):
            list(islice(reader.pull(arrived(writer.publish(version, self.weights(version).items()))), 1))
            writer.release(version - 1)
        same(read(reader, writer.publish(99, self.weights(99).items())), self.weights(99))

    def test_version_can_be_published_only_once(self, end: Ends) -> None:
        writer = end()
        manifest = writer.publish(1, self.weights(1).items())
        with pytest.raises(StateDictError):
            writer.publish(1, self.weights(2).items())
        same(read(end(), manifest), self.weights(1))

    def test_version_can_be_published_again_after_a_failure(self, end: Ends) -> None:
        def failing() -> Iterable[tuple[str, Any]]:
            yield next(iter(self.weights(2).items()))
            raise ZeroDivisionError

        writer, reader = end(), end()
        manifest = writer.publish(1, self.weights(1).items())
        with pytest.raises(ZeroDivisionError):
            writer.publish(2, failing())
        same(read(reader, manifest), self.weights(1))
        same(read(reader, writer.publish(2, self.weights(2).items())), self.weights(2))

    def test_slices_of_several_ranks_form_whole_tensors(self, end: Ends) -> None:
        import torch

        tensor, own = torch.arange(24.0).reshape(6, 4), torch.ones(3)
        slices = [TensorSlice(tensor[at : at + 3], SlicePosition((at, 0), (6, 4))) for at in (0, 3)]
        first = end(rank=0).publish(1, [("w", slices[0]), ("own", own)])
        second = end(rank=1).publish(1, [("w", slices[1])])
        manifest = join([first, second])
        same(read(end(), manifest), {"w": tensor, "own": own})
        refused(end(), replace(manifest, shards=manifest.shards[:1]))

    def test_slice_is_converted_to_its_published_dtype(self, end: Ends) -> None:
        import torch

        tensor = torch.linspace(-3, 3, 700_000).reshape(7, -1)  # more values than are converted at a time
        named = [("w", TensorSlice(tensor, SlicePosition((0, 0), tuple(tensor.shape)), "bfloat16"))]
        same(read(end(), end().publish(1, named)), {"w": tensor.bfloat16()})

    def test_corrupted_bytes_are_rejected_before_any_tensor(self, end: Ends) -> None:
        writer = end()
        first, second = (writer.publish(version, self.weights(version).items()) for version in (1, 2))
        self.corrupt(first)
        refused(end(), first)
        same(read(end(), second), self.weights(2))

    def test_bytes_of_another_version_are_rejected(self, end: Ends) -> None:
        writer = end()
        first, second = (writer.publish(version, self.weights(version).items()) for version in (1, 2))
        (shard,) = first.shards
        mixed = replace(second.shards[0], location=shard.location, remote=shard.remote)
        refused(end(), replace(second, shards=(mixed,)))

    def test_closed_transport_releases_its_resources_and_cannot_publish(self, end: Ends) -> None:
        writer, reader = end(), end()
        manifest = writer.publish(1, self.weights(1).items())
        same(read(reader, manifest), self.weights(1))
        reader.close()
        same(read(end(), manifest), self.weights(1))  # the memory did not belong to the reader
        writer.close()
        assert not self.left()
        refused(end(), manifest)
        with pytest.raises(StateDictError):
            writer.publish(2, self.weights(2).items())
        writer.close()
