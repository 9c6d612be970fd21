"""State of a run between checkpoints: `run_state.json`, the journal's segments, and the state that their records add up
to.

The segment after the checkpoint of version 40 is named `step-000040.journal`. As it grows, it is continued in
`step-000040.1.journal` and so on, so that copies stay small and a damaged block affects little.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import CheckpointError
from titan_rl.run.journal.log_file import Damage, read_log
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
from titan_rl.scheduling.batches import step_from
from titan_rl.scheduling.task_mix import MixEvent

FILE = "run_state.json"


def train_group_id(index: int) -> str:
    """Id of the group at a position in the training data."""
    return f"train-{index}"


def train_index(group_id: str) -> int:
    """Position in the training data of the group with a `train_group_id`."""
    return int(group_id.removeprefix("train-"))


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Position of a version of the weights in the data: the version has seen, or dropped, all groups before
    `next_index` except the unsettled ones."""

    version: int = 0
    next_index: int = 0
    unsettled: tuple[int, ...] = ()  # positions before next_index, ascending, that are neither trained nor dropped
    run: str = ""  # id of the run, so that its journal is not confused with another run's

    def is_settled(self, index: int) -> bool:
        """Return whether the weights have seen the group at a position in the data, or the group was dropped."""
        return index < self.next_index and index not in self.unsettled


@dataclass(frozen=True, slots=True)
class RunState:
    """Content of `run_state.json` in a checkpoint or, for the initial model, which is version 0, in the run's folder.

    Example:
        {"step": 40, "tokens": 181204, "reward_before": 0.44, "next_index": 164, "unsettled": [158, 160, 161, 162, 163],
         "tasks": {"taken": {"sums": 82, "sort": 82}, ...}, "settings": {"scheduling.groups_per_step": 4, ...},
         "run": "5d0c...", "inputs": {"models": {"model.path": {"weights": "9b1e...", ...}}, "data": {...}, ...}}
    """

    step: int = 0  # also the policy version
    tokens: int = 0  # completion tokens trained on
    reward_before: float | None = None  # mean reward of the first validation; None if there was none yet
    next_index: int = 0
    unsettled: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # settings of the run, by dotted name
    run: str = ""  # random id, drawn when the run began
    tasks: Mapping[str, Any] = field(default_factory=dict[str, Any])  # state of the task mix, see `TaskMix.state`
    advantages: Mapping[str, Any] = field(default_factory=dict[str, Any])  # see `SampleMaker.state`
    inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what the run reads, see `inputs_of`
    held_out: Mapping[int, float] = field(default_factory=dict[int, float])  # rewards by version; higher is better

    @property
    def position(self) -> DataPosition:
        return DataPosition(self.step, self.next_index, self.unsettled, self.run)

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read the state in a folder.

        Raises:
            CheckpointError: The file is missing, or has another format.
        """
        path = folder / FILE
        try:
            values = parse_json(path.read_text())
            return cls(
                step=int(values["step"]),
                tokens=int(values["tokens"]),
                reward_before=values["reward_before"],
                next_index=int(values["next_index"]),
                unsettled=tuple(map(int, values["unsettled"])),
                tasks=dict(values["tasks"]),
                settings=dict(values["settings"]),
                run=str(values["run"]),
                advantages=dict(values.get("advantages", {})),
                # Runs of older versions of the library have only the identity of the initial model, or nothing.
                inputs=dict(values.get("inputs") or {"models": {"model.path": values.get("model", {})}}),
                held_out={int(step): float(reward) for step, reward in values.get("held_out", {}).items()},
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} has no valid state of the run: {error!r}; restore the original file, or resume with the "
                "version of titan_rl that wrote it"
            ) from error

    def write(self, folder: Path) -> None:
        """Write the state to a folder, and flush it to the disk."""
        with (folder / FILE).open("w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())


SEGMENT_BYTES = 1 << 28

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?\.journal")


def segment_name(version: int, part: int = 0) -> str:
    return f"step-{version:06d}.{part}.journal" if part else f"step-{version:06d}.journal"


def version_of(segment: Path) -> int:
    """Version of the checkpoint that a segment follows."""
    return _numbers(segment)[0]


def part_of(segment: Path) -> int:
    """Number of files before this one for the same checkpoint."""
    return _numbers(segment)[1]


def list_segments(folder: Path) -> list[Path]:
    """List the segments in a folder, oldest first. Other files are ignored.

    Raises:
        CheckpointError: The folder exists and cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror}; it should be the folder of the journal. Repair it, or move it "
            "away to continue from the checkpoint alone"
        ) from error
    return sorted((folder / name for name in names if _NAME.fullmatch(name)), key=_numbers)


def unneeded_segments(segments: list[Path], version: int) -> list[Path]:
    """List the segments that no checkpoint of `version` or later needs."""
    begins = max((version_of(path) for path in segments if version_of(path) <= version), default=0)
    return [path for path in segments if version_of(path) < begins]


def _numbers(segment: Path) -> tuple[int, int]:
    found = _NAME.fullmatch(segment.name)
    assert found is not None, f"{segment} is not a segment"
    return int(found[1]), int(found[2] or 0)


CompletionsOfGroup = dict[tuple[str, bytes], CompletionRecord]
"""Recorded answers by request id and digest of the prompt."""


@dataclass(slots=True)
class JournalState:
    """State that the events since a checkpoint add up to."""

    next_index: int = 0
    unsettled: set[int] = field(default_factory=set[int])
    finished: dict[int, GroupRecord] = field(default_factory=dict[int, GroupRecord])
    completions: dict[int, CompletionsOfGroup] = field(default_factory=dict[int, CompletionsOfGroup])
    batches: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # groups by the version before the step

    @classmethod
    def at(cls, position: DataPosition) -> JournalState:
        return cls(position.next_index, set(position.unsettled))

    def apply(self, record: JournalRecord) -> None:
        """Apply one record. A record that is applied twice changes nothing the second time, and a record of a settled
        group changes nothing at all."""
        match record:
            case StartRecord():
                pass  # already known
            case AssignRecord() | ResultRecord():
                self._admit(record.index)
            case BatchRecord():
                self._admit(*record.indices)
                if self.batches.get(record.version) != record.indices:
                    for later in [version for version in self.batches if version > record.version]:
                        del self.batches[later]  # it was recorded before the run was resumed
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
        """Settle the batches that led to `version`: its checkpoint contains them."""
        for start in [start for start in self.batches if start < version]:
            for index in self.batches.pop(start):
                self._forget(index)

    def is_settled(self, index: int) -> bool:
        """Return whether the weights have seen the group, or it was dropped, so that it is not run again."""
        return index < self.next_index and index not in self.unsettled

    def holds(self, record: JournalRecord) -> bool:
        """Return whether a record still adds something to the state."""
        match record:
            case GroupRecord():
                return self.finished.get(record.index) is record
            case CompletionRecord():
                key = (record.completion.request_id, record.prompt_digest)
                return self.completions.get(record.index, {}).get(key) is record
            case _:
                return True

    def records(self) -> list[JournalRecord]:
        """List records from which this state can be built."""
        batches = [BatchRecord(version, self.batches[version]) for version in sorted(self.batches)]
        completions = [record for of_group in self.completions.values() for record in of_group.values()]
        return [*self.finished.values(), *completions, *batches]

    def batches_from(self, version: int) -> list[list[int]]:
        """List the batches that can be handed out again: consecutive ones, beginning at `version`, whose groups are all
        recorded."""
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
        """Admit groups. Groups are admitted in data order, so a known group implies all groups before it."""
        if (newest := max(indices)) >= self.next_index:
            self.unsettled.update(range(self.next_index, newest + 1))
            self.next_index = newest + 1

    def _forget(self, index: int) -> None:
        self.unsettled.discard(index)
        self.finished.pop(index, None)
        self.completions.pop(index, None)


@dataclass(frozen=True, slots=True)
class JournalContents:
    """Result of `read_segments`."""

    state: JournalState
    begins: bool  # whether the first record of the position's segment was found
    losses: list[str]
    events: list[MixEvent]  # in order; some may already be part of the checkpoint


def read_segments(segments: Sequence[Path], position: DataPosition) -> JournalContents:
    """Read the records of segments that follow a checkpoint's position.

    Raises:
        CheckpointError: The segments belong to another run or have another format, or a segment is not a readable file.
    """
    state, losses, starts = JournalState.at(position), list[str](), list[StartRecord]()
    events: list[MixEvent] = []
    if position.version == 0 and segments and version_of(segments[0]) > 0:
        raise CheckpointError(
            f"{segments[0]} belongs to a checkpoint that is gone, and there is no other: restore it, or move the "
            "journal's folder away to start from the initial model"
        )
    for path in segments:
        damages: list[Damage] = []
        for data in _records(path, damages):
            try:
                record = decode(data)
            except (msgspec.DecodeError, ValueError) as error:
                raise CheckpointError(
                    f"{path} has a record of another format: {error}; move the folder {path.parent} away to continue "
                    "from the checkpoint alone"
                ) from error
            if isinstance(record, StartRecord):
                if record.run != position.run:
                    raise CheckpointError(
                        f"{path} belongs to another run than the checkpoint of version {position.version}; restore "
                        f"this run's own, or move the folder {path.parent} away to continue from the checkpoint alone"
                    )
                if record.version == position.version:
                    starts.append(record)
            state.apply(record)
            events.extend(mix_events(record))
        if damages:
            losses.append(f"{path}: {sum(damage.size for damage in damages)} bytes are not a record and are skipped")
    for start in [start for start in state.batches if start < position.version]:
        del state.batches[start]  # already trained, or recorded before the run was resumed from an earlier checkpoint
    agrees = any(
        (start.next_index, tuple(start.unsettled)) == (position.next_index, position.unsettled) for start in starts
    )
    if starts and not agrees and not losses:
        start = starts[-1]
        raise CheckpointError(
            f"the checkpoint of version {position.version} has data before {position.next_index}, without "
            f"{ranges(position.unsettled)}, and its journal has data before {start.next_index}, without "
            f"{ranges(start.unsettled)}: they belong to different runs. Move the folder {segments[0].parent} away to "
            "continue from the checkpoint alone"
        )
    if not agrees and (segments or replace(position, run="") != DataPosition()):
        losses.append(_without_beginning(position.version))
    if losses and (again := sorted(state.unsettled - state.finished.keys())):
        losses.append(f"generated again, except for recorded answers: groups {ranges(again)}")
    return JournalContents(state, agrees, losses, events)


def _records(path: Path, damages: list[Damage]) -> Iterator[bytes]:
    """Iterate over the records of one segment. Its damaged parts are appended to `damages`."""
    try:
        yield from read_log(path, damages)
    except OSError as error:
        raise CheckpointError(
            f"{path}, a segment of the journal, cannot be read: {error.strerror}; repair it, or move the folder "
            f"{path.parent} away to continue from the checkpoint alone"
        ) from error


def _without_beginning(version: int) -> str:
    whose = f"the checkpoint of step {version}" if version else "the run"
    return (
        f"{segment_name(version)}, the segment of the journal that {whose} begins with, is missing or damaged. The run "
        "continues anyway: no sample of the data is left out or trained twice, and rollouts that are not recorded "
        "are generated again"
    )


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers: `ranges([1, 2, 3, 7])` is "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"
