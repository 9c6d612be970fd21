"""Journal of a run: events between two checkpoints, written as they happen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import CheckpointError, NoSpaceError, means_no_space
from titan_rl.generation.continuation import Generation, request_fn
from titan_rl.generation.recording import KnownAnswers, PendingRequests, RecordedAnswer, Recorder
from titan_rl.rollout.checked_copies import completion_of
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.journal.log_file import LogWriter, flush_entry
from titan_rl.run.journal.records import (
    AssignRecord,
    BatchRecord,
    CompletionRecord,
    DiscardRecord,
    DropRecord,
    JournalRecord,
    ResultRecord,
    StartRecord,
    encode,
    group_of,
    group_record,
)
from titan_rl.run.journal.state import (
    SEGMENT_BYTES,
    DataPosition,
    JournalContents,
    list_segments,
    part_of,
    read_segments,
    segment_name,
    unneeded_segments,
    version_of,
)
from titan_rl.scheduling.backlog import Backlog
from titan_rl.scheduling.task_mix import Assigned, Dropped, MixEvent, Result
from titan_rl.types import Completion, FinishReason, GenerateFn

logger = logging.getLogger(__name__)


class TrainSamples(Protocol):
    """Training samples of a run's tasks."""

    def train_sample(self, task: str, number: int) -> Any: ...


class RunJournal:
    """Journal of one run, which records the events of a `SchedulerObserver` in a folder with a segment for each
    checkpoint. A large segment has several files.

    A segment begins with the groups that are open at the checkpoint of its version, and continues with later events.
    The checkpoint itself has the data position, so nothing is skipped or trained twice, even if the journal is lost.
    Thanks to the journal, groups that were open at the checkpoint or came later need not be generated again. Batches
    that were trained after the checkpoint are handed out again unchanged, because the restored weights have not seen
    them.

    Attributes:
        losses: Messages for the user about missing or damaged parts, and about groups that are generated again.
        events: Events of the task mix that are recorded when the journal is opened. Some of them may already be part of
            the checkpoint.

    Args:
        position: Position of the checkpoint to continue from. Defaults to the beginning of the run.
        found: Result of `read_segments` for this position, if the folder was read before.
        segment_bytes: Size at which a segment is continued in another file, in bytes.

    Raises:
        CheckpointError: The journal belongs to another run than the checkpoint, a record has another format, a segment
            is not a file, or the folder is not a folder. After a failure of the disk, every call raises this.
        NoSpaceError: The disk has no room for the folder.
    """

    def __init__(
        self,
        folder: Path,
        position: DataPosition | None = None,
        found: JournalContents | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        position = position or DataPosition()
        self._folder = folder
        _make(folder)
        segments = list_segments(folder)
        found = found or read_segments(segments, position)
        self.state = found.state
        self.losses = found.losses
        self.events = found.events
        for loss in self.losses:
            logger.warning("%s", loss)
        self._version = position.version
        self._run = position.run
        self._pending: PendingRequests = {}
        self._segment_bytes = segment_bytes
        if found.begins:
            self._segment, self._num_bytes = segments[-1], segments[-1].stat().st_size
            self._writer = LogWriter(self._segment)
        else:
            self._segment, self._num_bytes = self._next_segment(segments, position.version), 0
            self._writer = LogWriter(self._segment)
            self._append(StartRecord(position.version, position.next_index, list(position.unsettled), position.run))
            for event in self.events:
                if isinstance(event, Dropped):
                    self.dropped(event.index, "dropped before the journal lost its beginning")
                else:
                    self.note(event)
            for record in self.state.records():
                self._append(record)

    @property
    def num_batches_again(self) -> int:
        """Number of batches that were trained after the checkpoint and are handed out again unchanged."""
        return len(self.state.batches_from(self._version))

    def backlog(self, samples: TrainSamples) -> Backlog:
        """Build the backlog from which a scheduler resumes."""
        state = self.state
        return Backlog(
            next_index=state.next_index,
            unsettled=sorted(state.unsettled),
            finished={
                index: group_of(record, samples.train_sample(record.task, record.sample))
                for index, record in state.finished.items()
            },
            batches=state.batches_from(self._version),
        )

    def recorder(self, index: int) -> Recorder:
        """Build the recorder of a group's requests. It repeats answers that were recorded before, by an earlier process
        or before a worker died and the group was run again. Its caller awaits `room` before its step."""
        return Recorder(index, partial(self._known, index), self.answered, completion_of, self._pending)

    def answered(self, answer: RecordedAnswer) -> None:
        """Record an answer from a `Recorder` in this process or in a rollout worker. A partial answer is ignored if a
        longer part is already recorded."""
        key = answer.completion.request_id, answer.prompt_digest
        known = self.state.completions.get(answer.index, {}).get(key)
        if known is not None and known.sampling == answer.sampling:
            is_part = answer.completion.finish_reason is FinishReason.ABORT
            if is_part and len(known.completion.token_ids) >= len(answer.completion.token_ids):
                return
        self._append(CompletionRecord(answer.index, answer.prompt_digest, answer.sampling, answer.completion))

    def _known(self, index: int) -> KnownAnswers:
        return self.state.completions.get(index, {})

    async def room(self) -> None:
        """Wait until the disk has caught up with the pending records."""
        await self._writer.room()

    def record(self, generate: GenerateFn, index: int) -> GenerateFn:
        """Wrap `generate` so that the `recorder` of a group runs around each call."""
        return Generation(request_fn(generate), around_attempt=[self.recorder(index).step], ready=self.room)

    def note(self, event: MixEvent) -> None:
        """Record an event of the task mix. A drop is recorded by `dropped`, with the reason."""
        match event:
            case Assigned(index, task, sample):
                self._append(AssignRecord(index, task, sample))
            case Result(index, rewards):
                self._append(ResultRecord(index, rewards))
            case Dropped():
                pass

    def finished(self, played: Assigned, group: RolloutGroup) -> None:
        """Record a finished group.

        Args:
            played: Position, task and sample of the group.
        """
        self._append(group_record(played, group))

    def dropped(self, index: int, reason: str) -> None:
        self._append(DropRecord(index, reason))

    def discarded(self, index: int) -> None:
        """Record that a group is generated again, so that its recorded answers no longer count."""
        self._append(DiscardRecord(index))

    def batch(self, version: int, indices: Sequence[int]) -> None:
        for start, trained in self.state.batches.items():
            if start < version:  # the weights have seen these groups, so memory no longer needs them
                for index in trained:
                    self.state.finished.pop(index, None)
        self._append(BatchRecord(version, list(indices)))

    async def checkpoint(
        self, version: int, next_index: int, tokens: Mapping[str, Completion] | None = None
    ) -> DataPosition:
        """Begin the segment of a checkpoint that is about to be written, with everything that is open at the
        checkpoint. Return once this is on the disk, before the checkpoint appears.

        Args:
            version: Version of the trainer's weights.
            next_index: Data position after all groups that were begun.
            tokens: Tokens so far of requests in flight, as aborted completions, by request id.

        Returns:
            The data position of the checkpoint.

        Raises:
            CheckpointError: The disk failed, or has accepted nothing for a long time.
        """
        state = self.state
        state.settle_trained(version)
        if next_index > state.next_index:
            state.unsettled.update(range(state.next_index, next_index))
            state.next_index = next_index
        position = DataPosition(version, state.next_index, tuple(sorted(state.unsettled)), self._run)
        open_records = state.records()
        self._turn_over(version)
        self._append(StartRecord(version, position.next_index, list(position.unsettled), position.run))
        for request_id, pending in list(self._pending.items()):
            so_far = (tokens or {}).get(request_id)
            if so_far is None or not so_far.token_ids or self._pending.get(request_id) is not pending:
                continue
            self._append(CompletionRecord(*pending, so_far))
            await self._writer.room()
            await asyncio.sleep(0)  # each of perhaps a thousand long answers takes a fraction of a millisecond
        for record in open_records:  # the segment may already have records that supersede some of these
            await self._writer.room()
            if state.holds(record):
                self._write(record)
            await asyncio.sleep(0)
        await in_thread(self._writer.drain)
        return position

    async def trained_since(self, position: DataPosition, version: int) -> list[list[RolloutGroup]]:
        """Read the groups of each step from a position to a version, as they were trained, without their samples.

        Args:
            position: Position of a checkpoint that is kept, whose version is the first one.
            version: Last version.

        Raises:
            CheckpointError: The groups of a step are damaged or lost, or the segments cannot be read; see
                `read_segments`.
        """
        await in_thread(self._writer.drain)
        return await in_thread(self._read_batches, position, version)

    def _read_batches(self, position: DataPosition, version: int) -> list[list[RolloutGroup]]:
        found = read_segments(list_segments(self._folder), position)
        batches = found.state.batches_from(position.version)[: version - position.version]
        if len(batches) < version - position.version:
            lost = f": {'; '.join(found.losses)}" if found.losses else ""
            raise CheckpointError(f"{self._folder} lacks the batch of step {position.version + len(batches) + 1}{lost}")
        return [[group_of(found.state.finished[index], None) for index in batch] for batch in batches]

    def forget_before(self, version: int) -> None:
        """Delete the segments that no checkpoint of `version` or later needs."""
        for path in unneeded_segments(list_segments(self._folder), version):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # a superfluous segment does no harm
                logger.warning("%s is no longer needed and cannot be deleted: %s", path, error.strerror)

    def drain(self) -> None:
        """Block until everything is on the disk."""
        self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def _append(self, record: JournalRecord) -> None:
        self.state.apply(record)
        self._write(record)

    def _write(self, record: JournalRecord) -> None:
        data = encode(record)
        if self._num_bytes and self._num_bytes + len(data) > self._segment_bytes:
            self._turn_over(version_of(self._segment))
        self._num_bytes += len(data)
        self._writer.append(data)

    def _turn_over(self, version: int) -> None:
        """Continue the segment in another file."""
        segments = [*list_segments(self._folder), self._segment]  # the current one may not be on the disk yet
        self._segment, self._num_bytes = self._next_segment(segments, version), 0
        self._writer.switch(self._segment)

    def _next_segment(self, segments: Sequence[Path], version: int) -> Path:
        last = max((part_of(path) for path in segments if version_of(path) == version), default=-1)
        return self._folder / segment_name(version, last + 1)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flush_entry(folder.parent)
    except OSError as error:
        if means_no_space(error):
            raise NoSpaceError(f"no space left in {folder.parent} for the folder of the journal") from error
        raise CheckpointError(
            f"{folder}, the folder of the journal, cannot be created: {error.strerror}; move away the file in its place"
        ) from error
