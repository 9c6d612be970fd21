"""How weights travel from the trainer to the generators: the manifest and the transport protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one parameter lies in the segment."""

    name: str  # Hugging Face parameter name
    dtype: str  # torch's name without the prefix: "float32"
    shape: tuple[int, ...]
    offset: int  # bytes from the segment's start
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Probe:
    """A sequence and the trainer's logprobs of it, so that a reader can check what it has loaded."""

    token_ids: tuple[int, ...]  # [num_tokens]
    logprobs: tuple[float, ...]  # [num_tokens - 1], temperature 1, of the tokens after the first


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader needs to find and check one published version. Small and picklable."""

    version: int
    location: str  # how the transport finds the bytes
    num_bytes: int
    checksum: int
    entries: tuple[TensorEntry, ...]
    probes: tuple[Probe, ...] = ()
    tolerance: float = 1e-5  # largest mean difference allowed between a probe's logprobs and the reader's
    host: str = ""  # of the writer, where other hosts can read it, too
    remote: Any = None  # by what they read it


class StateDictTransport(Protocol):
    """Versioned publish and pull. The only thing generation and training share."""

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, Any]],
        *,
        probes: Sequence[Probe] = (),
        tolerance: float = 1e-5,
    ) -> Manifest:
        """Write one version where readers can find it. A reader never sees it half written.

        Raises:
            StateDictError: the version was published already, or there is no room for it.
        """
        ...

    def pull(self, manifest: Manifest) -> Iterator[tuple[str, Any]]:
        """(name, tensor) pairs of a published version, after its sizes and checksum are verified.

        Raises:
            StateDictError: the version is gone or does not match its manifest.
        """
        ...

    def release(self, version: int) -> None:
        """Give a version's memory back. Readers that have it mapped keep reading; unknown versions are ignored."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
