"""What a run must not forget between two checkpoints, written down as it happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.durability.log import LogWriter, cut_torn_record, read_log
from titan_rl.durability.recorder import Recorder
from titan_rl.durability.records import (
    Batch,
    Dropped,
    Finished,
    Part,
    Record,
    Start,
    decode,
    encode,
    finished,
    group_of,
)
from titan_rl.errors import CheckpointError
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.backlog import Backlog
from titan_rl.types import Completion, GenerateFn

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class JournalState:
    """Everything since a checkpoint, as far as it still matters."""

    next_index: int = 0
    unsettled: set[int] = field(default_factory=set[int])
    finished: dict[int, Finished] = field(default_factory=dict[int, Finished])
    parts: dict[int, dict[tuple[str, bytes], Part]] = field(default_factory=dict[int, dict[tuple[str, bytes], Part]])
    batches: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # version it starts from -> groups

    def apply(self, record: Record) -> None:
        """Take in one record. A record that is applied twice changes nothing."""
        match record:
            case Start():
                self.next_index = record.next_index
                self.unsettled = set(record.unsettled)
            case Batch():
                self._admit(*record.indices)
                self.batches[record.version] = record.indices
            case Dropped():
                self._admit(record.index)
                self._forget(record.index)
            case Finished():
                self._admit(record.index)
                self.finished[record.index] = record
                self.parts.pop(record.index, None)
            case Part():
                self._admit(record.index)
                if record.index in self.unsettled and record.index not in self.finished:
                    key = (record.completion.request_id, record.prompt_digest)
                    self.parts.setdefault(record.index, {})[key] = record

    def settle_trained(self, version: int) -> None:
        """Batches that led to `version` are in its checkpoint."""
        for start in [start for start in self.batches if start < version]:
            for index in self.batches.pop(start):
                self._forget(index)

    def _admit(self, *indices: int) -> None:
        """Groups are admitted in data order: one that is known of implies those before it."""
        if (newest := max(indices)) >= self.next_index:
            self.unsettled.update(range(self.next_index, newest + 1))
            self.next_index = newest + 1

    def _forget(self, index: int) -> None:
        self.unsettled.discard(index)
        self.finished.pop(index, None)
        self.parts.pop(index, None)


class RunJournal:
    """The journal of one run: a `SchedulerObserver` that remembers. One segment a checkpoint, in a folder.

    A segment begins with what the checkpoint of its version leaves open, and goes on with what happens after it. To
    continue from a checkpoint is to read its segment and all later ones. Batches that were trained after it are handed
    out again as they were, since the restored weights have not seen them.

    Args:
        version: the checkpoint to continue from; 0 is the model as loaded.

    Raises:
        CheckpointError: a record is not of this journal's format, or the disk failed; from every call after that.
    """

    def __init__(self, folder: Path, version: int = 0) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        segments = [path for path in sorted(folder.glob("*.journal")) if _version_of(path) >= version]
        for path in segments:
            if torn := cut_torn_record(path):
                logger.warning("%s ended in a torn record of %d bytes, which is dropped", path, torn)
        self.state = _replay(segments, version)
        self._recorder = Recorder(self._append)
        fresh = not segments
        self._writer = LogWriter(self._segment(version) if fresh else segments[-1])
        if fresh:
            self._append(Start(version, 0, []))

    def backlog(self, sample_of: Callable[[int], Any]) -> Backlog:
        """Where a scheduler goes on.

        Args:
            sample_of: the training sample at a position in the data.
        """
        state = self.state
        return Backlog(
            next_index=state.next_index,
            unsettled=sorted(state.unsettled),
            finished={index: group_of(record, sample_of(index)) for index, record in state.finished.items()},
            batches=[state.batches[version] for version in sorted(state.batches)],
        )

    def record(self, generate: GenerateFn, index: int) -> GenerateFn:
        """`generate` for the rollouts of a group, which are answered again what they were answered before: by an
        earlier process, or when a worker died and the group is played again."""

        def known(request_id: str, prompt_digest: bytes) -> Completion | None:
            part = self.state.parts.get(index, {}).get((request_id, prompt_digest))
            return None if part is None else part.completion

        return self._recorder.record(generate, index, known)

    def finished(self, index: int, group: RolloutGroup) -> None:
        self._append(finished(index, group))

    def dropped(self, index: int, reason: str, group: RolloutGroup | None = None) -> None:
        self._append(Dropped(index, reason))

    def batch(self, version: int, indices: Sequence[int]) -> None:
        for start, trained in self.state.batches.items():
            if start < version:  # in the weights by now: the file has these groups, memory need not
                for index in trained:
                    self.state.finished.pop(index, None)
        self._append(Batch(version, list(indices)))

    def checkpoint(self, version: int, next_index: int, tokens: Mapping[str, Completion] | None = None) -> None:
        """Begin the segment of a checkpoint that is about to be written, with everything it leaves open.

        Args:
            next_index: the data position; groups that have left no trace yet are before it too.
            tokens: request id -> what requests in flight have got so far, as aborted completions.
        """
        state = self.state
        state.settle_trained(version)
        if next_index > state.next_index:
            state.unsettled.update(range(state.next_index, next_index))
            state.next_index = next_index
        self._writer.switch(self._segment(version))
        self._append(Start(version, state.next_index, sorted(state.unsettled)))
        for record in list(state.finished.values()):
            self._append(record)
        for part in [part for parts in state.parts.values() for part in parts.values()]:
            self._append(part)
        for part in self._recorder.in_flight(tokens or {}):
            self._append(part)

    def forget_before(self, version: int) -> None:
        """Delete the segments of checkpoints that are gone."""
        for path in self._folder.glob("*.journal"):
            if _version_of(path) < version:
                path.unlink(missing_ok=True)

    def drain(self) -> None:
        """Wait until everything is written."""
        self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def _append(self, record: Record) -> None:
        self.state.apply(record)
        self._writer.append(encode(record))

    def _segment(self, version: int) -> Path:
        return self._folder / f"step-{version:06d}.journal"


def _version_of(segment: Path) -> int:
    return int(segment.stem.removeprefix("step-"))


def _replay(segments: Sequence[Path], version: int) -> JournalState:
    """The state after the last record.

    A segment begins anew where its checkpoint was begun twice, because the first attempt died. The beginnings of later
    segments say what is known already.
    """
    state = JournalState()
    for path in segments:
        try:
            records = [decode(data) for data in read_log(path)]
        except (msgspec.DecodeError, ValueError) as error:
            raise CheckpointError(f"{path} has a record that cannot be read: {error}") from error
        for record in records:
            if not isinstance(record, Start):
                state.apply(record)
            elif record.version == version:
                state = JournalState()
                state.apply(record)
    state.settle_trained(version)
    return state
