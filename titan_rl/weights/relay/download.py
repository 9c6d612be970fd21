"""Download of one shard from another host, with failover to others, until it is complete and verified."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from titan_rl.core.errors import StateDictError
from titan_rl.weights.relay.origin import Sender
from titan_rl.weights.relay.server import (
    ConnectionLostError,
    Kind,
    RemoteShard,
    ask,
    connect,
    receive_head,
    receive_into,
    send,
)
from titan_rl.weights.relay.shard_copy import ChunkDelta, ShardCopy, apply_delta
from titan_rl.weights.shard_files import checksum

TRIAL_S = 1.0  # from one look to the next, for who reads from a host that reads from the trainer
MUCH_FASTER = 3.0
TELLING_BYTES = 1 << 18


class SlowError(Exception):
    """The sender is slow, or it is not known what fast is: one chunk from the trainer shows it."""


class Pace:
    """Rate at which the trainer sends to this host, in bytes per second, once measured."""

    def __init__(self) -> None:
        self.of_trainer: float | None = None

    def compare(self, bytes_per_s: float, trial_bytes: int, trial_s: float) -> bool:
        """Whether the trainer, which sent so many bytes in that time, is much faster. A small delta says little of a
        link, and is not remembered."""
        if trial_bytes >= TELLING_BYTES:
            self.of_trainer = trial_bytes / trial_s
        return bytes_per_s * MUCH_FASTER < trial_bytes / trial_s

    def is_slow(self, bytes_per_s: float) -> bool:
        return self.of_trainer is None or bytes_per_s * MUCH_FASTER < self.of_trainer


class PaceWatch:
    """Looks at what comes from one sender, now and then.

    Args:
        hops: of the sender from the trainer. Who is nearer to the trainer looks earlier, since its sender may be what
            makes the others slow.
    """

    def __init__(self, pace: Pace, hops: int) -> None:
        self._pace = pace
        self._every_s = hops * TRIAL_S
        self._begin()

    def came(self, num_bytes: int) -> None:
        """
        Raises:
            SlowError: it is time to compare the sender with the trainer.
        """
        self._bytes += num_bytes
        if time.monotonic() - self._began < self._every_s:
            return
        if self._pace.is_slow(self.bytes_per_s):
            raise SlowError
        self._begin()

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / max(time.monotonic() - self._began, 1e-6)

    def _begin(self) -> None:
        self._began, self._bytes = time.monotonic(), 0


logger = logging.getLogger(__name__)

AGAIN_S = 0.2  # between two attempts to reach the trainer
ALL = 1 << 40  # chunks


@dataclass(frozen=True, slots=True)
class Reading:
    """Parameters of a download: reader, source and time limit.

    Args:
        name: of the reader, which no other has.
        address: where others can read from it.
        timeout_s: longest time for a shard.
        pace: of the trainer, known from the versions before.
    """

    remote: RemoteShard
    name: str
    address: str
    timeout_s: float
    pace: Pace


def _ignore(num_bytes: int) -> None:
    pass


class Download:
    """Fills a copy. A sender that is gone, silent or slow is left for another one, from the chunk at which it stopped;
    the last resort is the trainer."""

    def __init__(self, reading: Reading, base: ShardCopy | None) -> None:
        self._reading = reading
        self._base = base
        self._deadline = time.monotonic() + reading.timeout_s
        self._trainer = Sender("", reading.remote.address, 0)
        self._avoid: list[str] = []
        self.received_bytes = 0

    def run(self, copy: ShardCopy) -> None:
        """By way of other hosts, and by deltas where there are any.

        Raises:
            StateDictError: the trainer has the version no more, or cannot be reached in time.
        """
        self._run(copy, self._place)

    def run_whole(self, copy: ShardCopy) -> None:
        """From the trainer alone, all bytes. Raises what `run` does."""
        self._base = None
        self._run(copy, lambda version: self._trainer)

    def _run(self, copy: ShardCopy, place: Callable[[int], Sender]) -> None:
        while not copy.is_whole:
            sender = self._trainer
            try:
                sender = place(copy.version)
                self._read_from(sender, copy)
            except ConnectionLostError as error:
                self._lost(sender.name, copy.version, error)
            except StateDictError as error:
                if not sender.name:
                    raise
                self._lost(sender.name, copy.version, error)

    def _read_from(self, sender: Sender, copy: ShardCopy) -> None:
        """Until the copy is whole."""
        while not copy.is_whole:
            watch = PaceWatch(self._reading.pace, sender.hops) if sender.name else None
            try:
                self._read(copy, sender.address, came=_ignore if watch is None else watch.came)
            except SlowError:
                assert watch is not None
                self._compare(watch.bytes_per_s, copy)

    def _compare(self, bytes_per_s: float, copy: ShardCopy) -> None:
        """Read the next chunk from the trainer, and leave the sender if that is much faster."""
        began, had = time.monotonic(), self.received_bytes
        self._read(copy, self._trainer.address, count=1)
        if self._reading.pace.compare(bytes_per_s, self.received_bytes - had, time.monotonic() - began):
            raise ConnectionLostError("the trainer itself is much faster")

    def _lost(self, sender: str, version: int, error: Exception) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s < 0 or (not sender and isinstance(error.__cause__, ConnectionRefusedError)):
            raise StateDictError(
                f"version {version} could not be read from {sender or 'the trainer'} in "
                f"{self._reading.timeout_s - left_s:.1f} s: {error}"
            ) from error
        logger.info("version %d is read from another host than %s: %s", version, sender or "the trainer", error)
        if sender:
            self._avoid.append(sender)
        else:
            time.sleep(AGAIN_S)

    def _place(self, version: int) -> Sender:
        reading = self._reading
        answer = ask(
            reading.remote.address,
            {
                "ask": "place",
                "token": reading.remote.token,
                "version": version,
                "host": reading.name,
                "address": reading.address,
                "avoid": self._avoid,
            },
        )
        return Sender(str(answer["host"]), str(answer["address"]), int(answer["hops"]))

    def _read(self, copy: ShardCopy, address: str, *, count: int = ALL, came: Callable[[int], None] = _ignore) -> None:
        """The next chunks, so many or all.

        Raises:
            SlowError: as of `came`.
        """
        remote = self._reading.remote
        with connect(address) as connection:
            message = {"ask": "read", "token": remote.token, "key": remote.key, "version": copy.version}
            base = None if self._base is None else self._base.version
            send(connection, {**message, "base": base, "first": copy.ready, "count": count})
            last = min(copy.ready + count, copy.num_chunks)
            steps: list[ChunkDelta] = []  # to the chunk that comes
            while copy.ready < last:
                head = receive_head(connection)
                came(0)
                if time.monotonic() > self._deadline:
                    raise ConnectionLostError(f"{copy.ready} of {copy.num_chunks} chunks are here")
                if head.kind is Kind.WAIT:
                    continue
                chunk = copy.chunk(copy.ready)
                size = len(chunk)
                fits = head.num_bytes == size if head.kind is Kind.RAW else head.num_bytes < size
                if head.index != copy.ready or not fits:
                    raise ConnectionLostError(f"chunk {head.index} of {head.num_bytes} bytes is not chunk {copy.ready}")
                if head.kind is Kind.RAW:
                    receive_into(connection, chunk.data, came)
                    copy.add()
                    steps.clear()
                else:
                    encoded = bytearray(head.num_bytes)
                    receive_into(connection, memoryview(encoded), came)
                    step = ChunkDelta(head.base, bytes(encoded), head.crc)
                    self._apply(copy, step, is_first=not steps)
                    steps.append(step)
                    if head.kind is Kind.DELTA:
                        copy.add(steps, self._base)
                        steps.clear()
                self.received_bytes += head.num_bytes

    def _apply(self, copy: ShardCopy, step: ChunkDelta, *, is_first: bool) -> None:
        base = self._base
        if base is None or (is_first and step.base != base.version):
            raise ConnectionLostError("a delta that was not asked for")
        chunk = copy.chunk(copy.ready)
        if is_first:
            chunk[:] = base.chunk(copy.ready)
        try:
            if zlib.crc32(step.encoded) != step.crc:
                raise StateDictError("a delta of weights has another checksum than its sender says")
            apply_delta(step.encoded, chunk)
        except StateDictError as error:
            self._base = None  # the rest, and this chunk, whole
            raise ConnectionLostError(str(error)) from error


def is_right(copy: ShardCopy, expected_checksum: int) -> bool:
    """Whether all bytes of a copy are those that were published."""
    return checksum(copy.data) == expected_checksum
