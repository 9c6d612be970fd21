"""What the records of a journal add up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from titan_rl.core.errors import CheckpointError
from titan_rl.run.journal.log_format import read_log
from titan_rl.run.journal.records import (
    AssignRecord,
    BatchRecord,
    CompletionRecord,
    DiscardRecord,
    DropRecord,
    GroupRecord,
    JournalRecord,
    ResultRecord,
    StartRecord,
    decode,
    mix_events,
)
from titan_rl.run.journal.run_state import DataPosition
from titan_rl.run.journal.segments import segment_name, version_of
from titan_rl.scheduling.batches.batch import step_from
from titan_rl.scheduling.mix.events import MixEvent

CompletionsOfGroup = dict[tuple[str, bytes], CompletionRecord]
"""By request id and digest of the prompt."""


@dataclass(slots=True)
class JournalState:
    """Everything since a checkpoint, as far as it still matters."""

    next_index: int = 0
    unsettled: set[int] = field(default_factory=set[int])
    finished: dict[int, GroupRecord] = field(default_factory=dict[int, GroupRecord])
    completions: dict[int, CompletionsOfGroup] = field(default_factory=dict[int, CompletionsOfGroup])
    batches: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # version it starts from -> groups

    @classmethod
    def at(cls, position: DataPosition) -> JournalState:
        return cls(position.next_index, set(position.unsettled))

    def apply(self, record: JournalRecord) -> None:
        """Take in one record. A record that is applied twice changes nothing, and neither does one of a group that is
        settled."""
        match record:
            case StartRecord():
                pass  # says what is known already
            case AssignRecord() | ResultRecord():
                self._admit(record.index)
            case BatchRecord():
                self._admit(*record.indices)
                if self.batches.get(record.version) != record.indices:
                    for later in [version for version in self.batches if version > record.version]:
                        del self.batches[later]  # of another course of events
                    self.batches[record.version] = record.indices
            case DropRecord():
                self._admit(record.index)
                self._forget(record.index)
            case DiscardRecord():
                self._admit(record.index)
                self.finished.pop(record.index, None)
                self.completions.pop(record.index, None)
            case GroupRecord():
                self._admit(record.index)
                if record.index in self.unsettled:
                    self.finished[record.index] = record
                    self.completions.pop(record.index, None)
            case CompletionRecord():
                self._admit(record.index)
                if record.index in self.unsettled and record.index not in self.finished:
                    key = (record.completion.request_id, record.prompt_digest)
                    self.completions.setdefault(record.index, {})[key] = record

    def settle_trained(self, version: int) -> None:
        """Batches that led to `version` are in its checkpoint."""
        for start in [start for start in self.batches if start < version]:
            for index in self.batches.pop(start):
                self._forget(index)

    def is_settled(self, index: int) -> bool:
        """Whether the group is in the weights, or was dropped: it is not run again."""
        return index < self.next_index and index not in self.unsettled

    def holds(self, record: JournalRecord) -> bool:
        """Whether it still says something new."""
        match record:
            case GroupRecord():
                return self.finished.get(record.index) is record
            case CompletionRecord():
                key = (record.completion.request_id, record.prompt_digest)
                return self.completions.get(record.index, {}).get(key) is record
            case _:
                return True

    def records(self) -> list[JournalRecord]:
        """All that it holds."""
        batches = [BatchRecord(version, self.batches[version]) for version in sorted(self.batches)]
        completions = [record for of_group in self.completions.values() for record in of_group.values()]
        return [*self.finished.values(), *completions, *batches]

    def batches_from(self, version: int) -> list[list[int]]:
        """Those that can be handed out again as they were: one after another, of groups that are all recorded."""
        found: list[list[int]] = []
        used: set[int] = set()
        while (batch := self.batches.get(version)) is not None:
            if len(set(batch)) < len(batch) or used & set(batch) or not all(index in self.finished for index in batch):
                break
            used.update(batch)
            found.append(batch)
            version = step_from(version)
        return found

    def _admit(self, *indices: int) -> None:
        """Groups are admitted in data order: one that is known of implies those before it."""
        if (newest := max(indices)) >= self.next_index:
            self.unsettled.update(range(self.next_index, newest + 1))
            self.next_index = newest + 1

    def _forget(self, index: int) -> None:
        self.unsettled.discard(index)
        self.finished.pop(index, None)
        self.completions.pop(index, None)


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What `read_segments` has found."""

    state: JournalState
    begins: bool  # whether the segment of the position is there
    losses: list[str]
    events: list[MixEvent]  # in their order; some may be known to the checkpoint


def read_segments(segments: Sequence[Path], position: DataPosition) -> JournalContents:
    """What segments know beyond a checkpoint's position, whichever of their records are left.

    Raises:
        CheckpointError: they are of another run, of another format, or one of them is no file that can be read.
    """
    state, losses, starts = JournalState.at(position), list[str](), list[StartRecord]()
    events: list[MixEvent] = []
    if position.version == 0 and segments and version_of(segments[0]) > 0:
        raise CheckpointError(
            f"{segments[0]} is of a checkpoint that is gone, and there is no other: put it back, or move the journal's "
            "folder away to begin with the model as loaded"
        )
    for path in segments:
        damages: list[int] = []
        for data in _records(path, damages):
            try:
                record = decode(data)
            except (msgspec.DecodeError, ValueError) as error:
                raise CheckpointError(
                    f"{path} has a record of another format: {error}; move the folder {path.parent} away to go on from "
                    "the checkpoint alone"
                ) from error
            if isinstance(record, StartRecord):
                if record.run != position.run:
                    raise CheckpointError(
                        f"{path} is of another run than the checkpoint of version {position.version}; put this run's "
                        f"own back, or move the folder {path.parent} away to go on from the checkpoint alone"
                    )
                if record.version == position.version:
                    starts.append(record)
            state.apply(record)
            events.extend(mix_events(record))
        if damages:
            losses.append(f"{path}: {sum(damages)} bytes are no record and are passed over")
    for start in [start for start in state.batches if start < position.version]:
        del state.batches[start]  # trained, or of another course of events
    agrees = any(
        (start.next_index, tuple(start.unsettled)) == (position.next_index, position.unsettled) for start in starts
    )
    if starts and not agrees and not losses:
        start = starts[-1]
        raise CheckpointError(
            f"the checkpoint of version {position.version} has data before {position.next_index}, without "
            f"{ranges(position.unsettled)}, and its journal has data before {start.next_index}, without "
            f"{ranges(start.unsettled)}: they are not of one run. Move the folder {segments[0].parent} away to go on "
            "from the checkpoint alone"
        )
    if not agrees and (segments or replace(position, run="") != DataPosition()):
        losses.append(_without_beginning(position.version))
    if losses and (again := sorted(state.unsettled - state.finished.keys())):
        losses.append(f"generated again, as far as answers are not recorded: groups {ranges(again)}")
    return JournalContents(state, agrees, losses, events)


def _records(path: Path, damages: list[int]) -> Iterator[bytes]:
    """Those of one segment; the sizes of what is none go to `damages`."""
    try:
        yield from read_log(path, on_damage=lambda offset, size: damages.append(size))
    except OSError as error:
        raise CheckpointError(
            f"{path}, a segment of the journal, cannot be read: {error.strerror}; mend it, or move the folder "
            f"{path.parent} away to go on from the checkpoint alone"
        ) from error


def _without_beginning(version: int) -> str:
    whose = f"the checkpoint of step {version}" if version else "the run"
    return (
        f"{segment_name(version)}, the segment of the journal that {whose} begins with, is missing or damaged. The run "
        "goes on all the same: no sample of the data is left out or trained twice, and rollouts that are not recorded "
        "are generated again"
    )


def ranges(numbers: Sequence[int]) -> str:
    """`ranges([1, 2, 3, 7])` is "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"
