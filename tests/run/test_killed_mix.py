"""A killed run of several tasks resumes each task where it was, however its journal is damaged."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from test_controller import Counting
from test_killed_run import STEPS, Rig, at_each_record

from titan_rl import RolloutGroup
from titan_rl.config.tasks import TaskSource
from titan_rl.run.journal.records import AssignRecord, DropRecord, decode
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import train_index
from titan_rl.scheduling.curriculum import CurriculumState, InOrder

Played = tuple[str, int]


class Picky(Counting):
    """Task that drops one sample in three."""

    def drop_reason(self, group: RolloutGroup) -> str | None:
        return "too_easy" if group.sample == 4 else None


class Remembering(InOrder):
    """Curriculum that skips a sample for every ended group, so that its next sample depends on the whole history."""

    def begin(self) -> CurriculumState:
        return {"next": 0, "ended": []}

    def next_sample(self, state: CurriculumState) -> int:
        return state["next"] + len(state["ended"])

    def given(self, state: CurriculumState, sample: int) -> None:
        state["next"] += 1

    def finished(self, state: CurriculumState, sample: int, rewards: Sequence[float]) -> None:
        state["ended"].append([sample, *rewards])


TASKS = (
    TaskSource(task=Counting(), name="plain", weight=2.0),  # pyright: ignore[reportArgumentType]
    TaskSource(task=Picky(), name="picky"),  # pyright: ignore[reportArgumentType]
    TaskSource(task=Counting(), name="led", curriculum=Remembering()),  # pyright: ignore[reportArgumentType]
)
IN_ORDER = TASKS[:2]

SCHEDULES = pytest.mark.parametrize(
    "scheduling",
    [{"max_staleness": 0}, {"max_staleness": 1, "oversample": 1.0, "on_batch_ready": "abort", "tail": "tail_batch"}],
    ids=["on-policy", "partial"],
)


def without_a_file(data: bytes) -> bytes | None:
    return None


DAMAGES: list[Callable[[bytes], bytes | None]] = [
    without_a_file,
    lambda data: b"",
    lambda data: data[: len(data) // 2],
    lambda data: bytes(len(data)),
    lambda data: data + bytes(12),
    lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    lambda data: data[:20] + data[40:],
]


class Notes:
    """Samples played by each group, and dropped groups, according to the journals of all attempts."""

    def __init__(self) -> None:
        self.played: dict[int, Played] = {}
        self.dropped: set[int] = set()

    def listen(self, journal: RunJournal) -> None:
        append = journal._writer.append  # pyright: ignore[reportPrivateUsage]

        def spy(data: bytes) -> None:
            self.take(data)
            append(data)

        journal._writer.append = spy  # pyright: ignore

    def take(self, data: bytes) -> None:
        match decode(data):
            case AssignRecord(index, task, sample):
                self.played[index] = (task, sample)
            case DropRecord(index):
                self.dropped.add(index)
            case _:
                pass

    def of(self, weights: list[list[str]]) -> list[Played]:
        return [self.played[train_index(group)] for step in weights for group in step]


@SCHEDULES
async def test_kill_at_any_record_keeps_assigned_samples(tmp_path: Path, scheduling):
    first, notes = Rig(tmp_path / "run", 0, tasks=TASKS, **scheduling), Notes()
    notes.listen(first.journal)
    moments = set(random.Random(7).sample(range(1, 110), 8))
    known: dict[int, dict[int, Played]] = {}

    def copy_disk(number: int) -> None:
        if number in moments:
            first.journal.drain()
            known[number] = dict(notes.played)
            shutil.copytree(tmp_path / "run", tmp_path / f"killed-{number}")

    at_each_record(first.journal, copy_disk)
    await first.run()
    undisturbed = notes.of(first.trainer.weights)
    assert len(undisturbed) == len(set(undisturbed)) == STEPS * 3

    for number, before in known.items():
        again, later = Rig(tmp_path / f"killed-{number}", number, tasks=TASKS, **scheduling), Notes()
        later.played.update(before)
        later.listen(again.journal)
        await again.run()
        assert {index: later.played[index] for index in before} == before, "assigned samples do not change"
        trained = later.of(again.trainer.weights)
        assert len(trained) == len(set(trained)) == STEPS * 3
        if scheduling == {"max_staleness": 0}:
            assert trained == undisturbed


@SCHEDULES
@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_journal_neither_skips_nor_repeats_samples(tmp_path: Path, scheduling, damage):
    first, notes = Rig(tmp_path / "run", 0, tasks=IN_ORDER, interval=2, **scheduling), Notes()
    notes.listen(first.journal)
    await first.run_until(30)
    saved = len(first.trainer.weights)
    assert 0 < saved < STEPS
    for segment in (tmp_path / "run" / "journal").iterdir():
        data = segment.read_bytes()
        content = damage(data) if len(data) > 200 else None
        if content is None:
            segment.unlink()
        else:
            segment.write_bytes(content)
    again = Rig(tmp_path / "run", 1, tasks=IN_ORDER, interval=2, **scheduling)
    assert again.journal.losses
    later = Notes()
    later.played = {
        index: played for index, played in notes.played.items() if again.journal.state.is_settled(index)
    } | {index: (task, sample) for index, task, sample, *_ in again.controller._mix.state()["open"]}  # pyright: ignore
    later.dropped = set(notes.dropped)
    later.listen(again.journal)
    await again.run()
    assert again.trainer.weights[:saved] == first.trainer.weights
    trained = later.of(again.trainer.weights)
    assert len(trained) == len(set(trained)) == STEPS * 3
    seen = defaultdict[str, set[int]](set)
    for task, sample in [*trained, *(later.played[index] for index in later.dropped if index in later.played)]:
        seen[task].add(sample)
    left_out = {task: set(range(max(samples))) - samples for task, samples in seen.items()}
    in_flight = set(later.played.values()) - set(trained)
    assert all((task, sample) in in_flight for task, samples in left_out.items() for sample in samples)
    if scheduling == {"max_staleness": 0}:
        for task in seen:
            samples = [sample for of, sample in trained if of == task]
            assert samples == sorted(samples), "in order"


async def test_edited_task_weights_apply_from_the_resumed_step(tmp_path: Path):
    first = Rig(tmp_path / "run", 0, tasks=IN_ORDER, steps=3, max_staleness=0)
    await first.run()
    edited = (IN_ORDER[0].model_copy(update={"weight": 1.0}), IN_ORDER[1].model_copy(update={"weight": 2.0}))
    again, notes = Rig(tmp_path / "run", 0, tasks=edited, steps=9, max_staleness=0), Notes()
    notes.listen(again.journal)
    await again.run()
    trained = notes.of(again.trainer.weights[3:])
    assert abs(sum(task == "picky" for task, _ in trained) - 12) <= 1
