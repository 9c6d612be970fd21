"""Types of state-dict sync: the manifest of a version, the transport protocol, and the record of published versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from titan_rl.core.errors import StateDictError, UnavailableWeightsError

NUM_KEPT = 2
"""Number of versions that can be read at a time: a reader may still be reading the version before the newest."""


@dataclass(frozen=True, slots=True)
class SlicePosition:
    """Position of a slice in its whole tensor.

    Example: the lower half of a [6, 4] matrix has shape (3, 4) and `SlicePosition((3, 0), (6, 4))`.
    """

    start: tuple[int, ...]  # position of the slice's first element
    global_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of a larger tensor, to publish. An empty box only names the tensor, whose slices other processes have."""

    tensor: Any
    position: SlicePosition
    dtype: str | None = None  # dtype to publish, such as "bfloat16", by default the tensor's; copying converts

    @staticmethod
    def of(value: Any) -> TensorSlice:
        """The slice itself, or a tensor as the slice that is all of it."""
        if isinstance(value, TensorSlice):
            return value
        return TensorSlice(value, SlicePosition((0,) * value.ndim, tuple(value.shape)))

    @property
    def partial_position(self) -> SlicePosition | None:
        """The position; None if the slice is the whole tensor."""
        is_whole = tuple(self.tensor.shape) == self.position.global_shape and not any(self.position.start)
        return None if is_whole else self.position


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Position of a parameter, or of a slice of one, in a shard."""

    name: str  # Hugging Face parameter name
    dtype: str  # torch's name without the prefix: "float32"
    shape: tuple[int, ...]
    offset: int  # bytes from the shard's start
    num_bytes: int
    position: SlicePosition | None = None  # None for a whole tensor


@dataclass(frozen=True, slots=True)
class Probe:
    """A sequence and the trainer's logprobs of its tokens, with which a reader can check the weights it has loaded."""

    token_ids: tuple[int, ...]  # [num_tokens]
    logprobs: tuple[float, ...]  # [num_tokens - 1], of the tokens after the first, at temperature 1


@dataclass(frozen=True, slots=True)
class Shard:
    """The bytes of a version that one process wrote, and their location."""

    location: str  # location of the bytes, as the transport defines it
    num_bytes: int
    checksum: int
    entries: tuple[TensorEntry, ...]
    host: str = ""  # host of the writer, if other hosts can read the shard
    remote: Any = None  # address at which other hosts read the shard, as the transport defines it
    box_checksums: bytes = b""  # 8 bytes for each entry, little-endian; see `titan_rl.core.tensor_checksum`


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a reader needs to find and check one published version. A manifest is small and can be pickled.

    The manifest of one process has one shard; `titan_rl.weights.manifest.join` joins the manifests of several
    processes.
    """

    version: int
    shards: tuple[Shard, ...]
    probes: tuple[Probe, ...] = ()
    tolerance: float = 1e-5  # largest mean difference allowed between a probe's logprobs and the reader's
    pinned: int | None = None  # older version that engines with pinned versions keep in addition to this one


@runtime_checkable
class StateDictTransport(Protocol):
    """Versioned publish and pull of weights, the only connection between training and generation.

    `titan_rl.testing.transport_contract` tests the properties of every transport.
    """

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Any]]) -> Manifest:
        """Write one version where readers can find it. A reader never sees a version that is only partly written.

        Args:
            version: Version of the weights.
            named_tensors: (name, tensor) pairs, or (name, `TensorSlice`) if this process has only a slice of a tensor.

        Raises:
            StateDictError: The version was published already, or there is no space for it.
        """
        ...

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, Any]]:
        """(name, whole tensor) pairs of a published version, in the order in which its shards first name them.

        Everything is verified before the first pair: the slices make up the tensors, and the size and checksum of each
        shard are right.

        Raises:
            StateDictError: The version, or a shard of it, is gone or does not match the manifest.
        """
        ...

    def release(self, version: int) -> None:
        """Free a version's memory. Readers that have it mapped can still read it; unknown versions are ignored."""
        ...

    def close(self) -> None:
        """Free everything that this end has published or holds. It cannot publish any more; further calls do
        nothing."""
        ...


@runtime_checkable
class HoldingTransport(Protocol):
    """A transport that can keep one version longer than the newest `NUM_KEPT`, for readers that start late."""

    def hold(self, version: int | None) -> None:
        """Keep a published version until it is released, or a later call holds another. None holds no version."""
        ...


@runtime_checkable
class MeasuredTransport(Protocol):
    """A transport whose readers measure pulls beyond their duration. `metrics.jsonl` has the largest value over all
    readers."""

    def pull_figures(self) -> Mapping[str, float]:
        """Figures of the last pull; their metric names are prefixed with `sync/`."""
        ...


class PublishedWeights:
    """The newest manifest, the held one, and the measurements of each reader's last pull.

    Example:

        published.announce(manifest)                      # version 7
        published.manifest_of(7)                          # for a replica that pulls version 7
        published.note_pull("generator-0", {"stall_s": 0.02, "probe_diff": 3e-7})
        published.worst()                                 # {"stall_s": 0.02, "probe_diff": 3e-7}
    """

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._held: Manifest | None = None
        self._pinned: int | None = None
        self._figures: dict[str, Mapping[str, float]] = {}

    def announce(self, manifest: Manifest) -> None:
        """Replace the version that readers pull.

        Raises:
            StateDictError: The version is older than the newest announced one. Versions never go back.
        """
        if self._manifest is not None and manifest.version < self._manifest.version:
            raise StateDictError(
                f"version {manifest.version} is published after version {self._manifest.version}; they never go back"
            )
        self._manifest = replace(manifest, pinned=self._pinned)
        if self._held is not None and self._held.version == manifest.version:  # published again
            self._held = self._manifest

    def hold(self, version: int, *, pinned: bool) -> None:
        """Keep the manifest of the newest version until `let_go`, for readers that start late.

        Args:
            version: The newest version.
            pinned: Whether readers keep the version in their engines in addition to later ones.

        Raises:
            UnavailableWeightsError: The version is not the newest.
        """
        self._held = self.manifest_of(version)
        self._pinned = version if pinned else None
        self._manifest = self._held = replace(self._held, pinned=self._pinned)

    def let_go(self) -> None:
        """Forget the held version."""
        self._held = self._pinned = None

    def manifest_of(self, version: int) -> Manifest:
        """The manifest of the newest version, or of the held one.

        Raises:
            UnavailableWeightsError: The version is neither the newest nor the held one.
        """
        if self._held is not None and self._held.version == version:
            return self._held
        if self._manifest is None or self._manifest.version != version:
            newest = "none" if self._manifest is None else self._manifest.version
            raise UnavailableWeightsError(f"version {version} is not published; the newest is {newest}")
        return self._manifest

    def note_pull(self, reader: str, figures: Mapping[str, float]) -> None:
        self._figures[reader] = figures

    def worst(self) -> dict[str, float]:
        """The largest value of each figure over the readers."""
        names = {name for figures in self._figures.values() for name in figures}
        return {name: max(f[name] for f in self._figures.values() if name in f) for name in sorted(names)}
