"""Publishing of a trainer's weights while it continues, with checksums and probes by which readers verify them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from titan_rl.core.errors import StateDictError
from titan_rl.core.tracing.spans import span
from titan_rl.training.device import side_stream
from titan_rl.training.trainer import READ_LIMIT_S, TrainerCore
from titan_rl.weights.types import NUM_KEPT, HoldingTransport, Manifest, Probe, StateDictTransport, TensorSlice
from titan_rl.weights.verification import make_probes, with_checksums

T = TypeVar("T")

PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ProbeDefaults:
    """Number of probes, and the largest mean logprob difference of a probe, in nats. Unless there are many probes,
    rounding hides the change of a step."""

    count: int
    tolerance: float

    @classmethod
    def of(cls, dtype: torch.dtype, device_type: str) -> ProbeDefaults:
        """Choose the defaults for weights of a dtype on a type of device.

        On GPUs the tolerance is larger, because attention kernels multiply float32 numbers as TF32, which has 10 bits
        of mantissa.
        """
        if dtype is torch.bfloat16:
            return cls(32, 0.1)
        return cls(32, 1e-2) if device_type == "cuda" else cls(4, 1e-5)


class WeightPublisher:
    """Publishes the weights that this rank holds. The first rank adds the trainer's logprobs of the probe sequences.

    A thread copies the weights during the next forward and backward pass; the optimizer waits for it. The newest
    `NUM_KEPT` versions stay available.

    Args:
        transport: Transport of this rank. `close` closes it.
        num_probes: Number of sequences by which readers check a version. By default, that of `ProbeDefaults`.
        tolerance: Largest mean logprob difference of a sequence, in nats. By default, that of `ProbeDefaults`.
        seed: Seed of the sequences.

    Example:

        publisher.begin()              # on every rank
        trainer.step(samples)          # changes no weight before it is copied
        manifest = publisher.finish()  # on every rank; of the version before the step
    """

    def __init__(
        self,
        trainer: TrainerCore,
        transport: StateDictTransport,
        *,
        num_probes: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> None:
        self._trainer = trainer
        self._world = trainer.world.with_own_group()
        self._transport = transport
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._publishing: Future[Manifest] | None = None
        self._kept: deque[int] = deque()  # versions that can be read, ascending, without the one that is held
        self._held: int | None = None
        defaults = ProbeDefaults.of(trainer.dtype, trainer.device.type)
        self._tolerance = tolerance or defaults.tolerance
        length = min(PROBE_TOKENS, trainer.max_context - 1)  # a reader may have to add a token to score them
        num_probes = defaults.count if num_probes is None else num_probes
        self._probe_sequences = trainer.draw(num_probes, length, seed)

    def begin(self) -> None:
        """Begin to publish this rank's part of the current version. All ranks call this at the same time."""
        probes = make_probes(self._trainer.score_published, self._probe_sequences)
        slices = self._trainer.held_slices()
        version, stream = self._trainer.version, side_stream()
        writing = self._submit(lambda: self._write(version, slices, probes if self._world.is_first else (), stream))
        self._trainer.hold_weights(writing)
        self._publishing = self._submit(lambda: self._settle(version, writing))

    def finish(self) -> Manifest:
        """Wait until the version begun last is published or has failed, on all ranks. Any thread may call this.

        Returns:
            A manifest of one shard. `titan_rl.weights.manifest.join` joins the manifests of all ranks.

        Raises:
            StateDictError: A rank has already published the version, has no room for it, or cannot write it. This is
                raised on all ranks, which discard their parts; older versions stay. Also raised if no version was
                begun, or if it takes too long.
        """
        if self._publishing is None:
            raise StateDictError("no version was begun to be published")
        if not wait([self._publishing], timeout=READ_LIMIT_S).done:
            raise StateDictError(f"the version begun last was not published within {READ_LIMIT_S:g} s")
        return self._publishing.result()

    def publish(self) -> Manifest:
        """Call `begin` and `finish`. This raises the same errors as `finish`."""
        self.begin()
        return self.finish()

    def hold(self, version: int | None) -> bool:
        """Keep a published version in addition to the newest ones, in place of the version held before. With None, hold
        no version. Any thread may call this.

        Returns:
            Whether the transport can hold a version and has this one.
        """
        return self._submit(lambda: self._hold(version)).result()

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Run work in the publisher's thread with the caller's context variables: a transport over Monarch sends as the
        caller's actor."""
        return self._thread.submit(copy_context().run, work)

    def _hold(self, version: int | None) -> bool:
        transport = self._transport
        if not isinstance(transport, HoldingTransport):
            return version is None
        if self._held not in (None, version):
            self._kept.appendleft(self._held)
            self._held = None
        is_available = version is None or version == self._held or version in self._kept
        if version in self._kept:
            self._kept.remove(version)
            self._held = version
        transport.hold(self._held)
        self._release_oldest()
        return is_available

    def _release_oldest(self) -> None:
        while len(self._kept) > NUM_KEPT:  # the transport may have released it already, to make room
            self._transport.release(self._kept.popleft())

    def close(self) -> None:
        """Free the published versions once the last one is written."""
        self._thread.shutdown()
        self._transport.close()

    def _write(
        self,
        version: int,
        slices: Sequence[tuple[str, TensorSlice]],
        probes: tuple[Probe, ...],
        stream: AbstractContextManager[object],
    ) -> Manifest:
        """Copy this rank's slices, which share the trainer's memory, without waiting for other ranks.

        Args:
            stream: Context in which this thread may read the slices.
        """
        dtype = str(self._trainer.dtype).removeprefix("torch.")
        with stream, span("publish copy", "sync", lane="publish", version=version):
            named = [(name, replace(piece, dtype=dtype)) for name, piece in slices]
            manifest = with_checksums(self._transport.publish(version, named), named)
            return replace(manifest, probes=probes, tolerance=self._tolerance)

    def _settle(self, version: int, writing: Future[Manifest]) -> Manifest:
        """Agree with the other ranks on the outcome. If one of them could not write the version, all of them withdraw
        it."""
        problem = None
        if (failed := writing.exception()) is not None:
            reason = str(failed) if isinstance(failed, StateDictError) else repr(failed)
            problem = f"trainer rank {self._world.rank}: {reason}"
        try:
            self._world.agree(problem, StateDictError)
        except StateDictError as error:
            if failed is not None:
                raise error from failed
            self._transport.release(version)
            raise
        self._kept.append(version)
        self._release_oldest()
        return writing.result()
