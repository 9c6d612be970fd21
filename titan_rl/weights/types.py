"""How weights travel from the trainer to the generators: the manifest and the transport protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

NUM_KEPT = 2
"""Versions that can be read at a time: a reader may still be at the one before the newest."""


@dataclass(frozen=True, slots=True)
class SlicePosition:
    """Where a slice lies in the tensor that it is cut from.

    Example: the lower half of a [6, 4] matrix has shape (3, 4) and `SlicePosition((3, 0), (6, 4))`.
    """

    start: tuple[int, ...]  # of the slice's first element
    whole_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A tensor to publish that is a box cut out of a larger one. An empty one only names it: others have its slices."""

    tensor: Any
    position: SlicePosition
    dtype: str | None = None  # to publish it as, "bfloat16"; by default the tensor's own. Nobody has a converted copy.


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one parameter, or a slice of one, lies in a shard."""

    name: str  # Hugging Face parameter name
    dtype: str  # torch's name without the prefix: "float32"
    shape: tuple[int, ...]
    offset: int  # bytes from the shard's start
    num_bytes: int
    position: SlicePosition | None = None  # None where it is the whole tensor


@dataclass(frozen=True, slots=True)
class Probe:
    """A sequence and the trainer's logprobs of it, so that a reader can check what it has loaded."""

    token_ids: tuple[int, ...]  # [num_tokens]
    logprobs: tuple[float, ...]  # [num_tokens - 1], temperature 1, of the tokens after the first


@dataclass(frozen=True, slots=True)
class Shard:
    """What one process wrote of a version, and how it is found."""

    location: str  # how the transport finds the bytes
    num_bytes: int
    checksum: int
    entries: tuple[TensorEntry, ...]
    host: str = ""  # of the writer, where other hosts can read it, too
    remote: Any = None  # by what they read it
    box_checksums: bytes = b""  # of each entry, 8 bytes little-endian; see `titan_rl.core.tensor_checksum`


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader needs to find and check one published version. Small and picklable.

    What one process publishes has one shard; `titan_rl.weights.shards.join` makes one version of what several do.
    """

    version: int
    shards: tuple[Shard, ...]
    probes: tuple[Probe, ...] = ()
    tolerance: float = 1e-5  # largest mean difference allowed between a probe's logprobs and the reader's


@runtime_checkable
class StateDictTransport(Protocol):
    """Versioned publish and pull. The only thing generation and training share. What holds of every transport is in
    `titan_rl.testing.transport_contract`, as tests."""

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, Any]],
        *,
        probes: Sequence[Probe] = (),
        tolerance: float = 1e-5,
    ) -> Manifest:
        """Write one version where readers can find it. A reader never sees it half written.

        Args:
            named_tensors: (name, tensor), or (name, `TensorSlice`) where this process has a slice of it.

        Raises:
            StateDictError: the version was published already, or there is no room for it.
        """
        ...

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, Any]]:
        """(name, tensor) pairs of a published version, whole, in the order of the first shard that names them.

        Everything is verified before the first pair: that the slices make up the tensors, and each shard's size and
        checksum.

        Raises:
            StateDictError: the version, or a shard of it, is gone or does not match the manifest.
        """
        ...

    def release(self, version: int) -> None:
        """Give a version's memory back. Readers that have it mapped keep reading; unknown versions are ignored."""
        ...

    def close(self) -> None:
        """Give back all that this end has published or holds. It publishes nothing more; closing again does nothing."""
        ...


@runtime_checkable
class MeasuredTransport(Protocol):
    """A transport whose readers measure more than their time. `metrics.jsonl` has it, the largest of all readers'."""

    def pull_figures(self) -> Mapping[str, float]:
        """Of the last pull; the names stand behind `sync/`."""
        ...
