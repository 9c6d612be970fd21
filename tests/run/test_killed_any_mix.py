"""Kill and resume at any record, for any combination of tasks, filters, curricula and staleness bounds."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from depth import DEEP, examples
from test_controller import Counting
from test_killed_mix import Remembering
from test_killed_run import GROUPS, CountingReplica, Rig, at_each_record
from test_run_journal import group_of

from titan_rl import RolloutGroup
from titan_rl.config.sections import ValidationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.console import ConsoleLines
from titan_rl.core.settings import Section
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.log_file import frame, read_log
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.observability.rollout_log import GroupRecords, RolloutLog
from titan_rl.scheduling.curriculum import ByDifficulty, InOrder, Stages
from titan_rl.scheduling.task_mix import TaskMix, WeightedTask


class Filtered(Counting):
    """A task that rejects a share of its groups; which ones also depends on the weights that sampled them."""

    rejected: float = 0.5

    def drop_reason(self, group: RolloutGroup) -> str | None:
        version = max(group.versions)
        return "rejected" if random.Random(f"{group.group_id}/{version}").random() < self.rejected else None


INVERTED = (69, 75, 117, 148, 248, 274, 338)
"""Seeds of runs in which groups that come late in the data hold early turns when they are killed."""

SEEDS = (*INVERTED, *range(examples(136)), *range(500, 900 if DEEP else 500))

CURRICULA: list[Section] = [
    InOrder(),
    Remembering(),
    ByDifficulty(samples=5, too_easy=3.0),
    Stages(sizes=(3, 4), threshold=3.0, window=2),
]


class UnevenReplica(CountingReplica):
    """Replica that is slow to answer one training request in four."""

    async def generate(self, prompt_token_ids, *, request_id, session_id=None, sampling):
        if request_id.startswith("train") and self._random.random() < 0.25:
            for _ in range(self._random.randrange(200)):
                await asyncio.sleep(0)
        return await super().generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)


def drawn_scheduling(draw: random.Random) -> dict[str, Any]:
    staleness = draw.choice([0, 1, 1, 1, 2, 3])
    settings: dict[str, Any] = {"max_staleness": staleness, "max_refills": 1000}
    if draw.random() < 0.4:
        settings["oversample"] = draw.choice([0.3, 0.5, 1.0, 2.0])
    if draw.random() < 0.3:
        settings["window"] = draw.choice([2, 3, 5])
    elif draw.random() < 0.4:
        settings["max_group_age"] = staleness + 1 + int(settings.get("oversample", 0)) + draw.randrange(3)
    if draw.random() < 0.4:
        settings["tail"] = draw.choice(["tail_batch", "drop"])
    if draw.random() < 0.3:
        settings["on_batch_ready"] = draw.choice(["abort", "keep"])
    if draw.random() < 0.3:
        settings["max_token_age"] = draw.randrange(staleness + 1)
    return settings


def drawn_tasks(draw: random.Random) -> tuple[TaskSource, ...]:
    return tuple(
        TaskSource(
            task=draw.choice([Counting(), Filtered(), Filtered(rejected=0.8)]),  # pyright: ignore[reportArgumentType]
            name=f"task-{number}",
            weight=draw.choice([1.0, 1.0, 2.0, 5.0]),
            curriculum=draw.choice(CURRICULA),  # pyright: ignore[reportArgumentType]
        )
        for number in range(draw.choice([1, 2, 2, 3]))
    )


def damaged(folder: Path, draw: random.Random) -> None:
    """Lose some records of a journal."""
    for segment in (folder / "journal").iterdir():
        kept = [record for record in read_log(segment) if draw.random() > 0.1]
        segment.write_bytes(b"".join(map(frame, kept)))


async def killed_at(rig: Rig, record: int, disk: Path) -> bool:
    """Run until the journal has another `record` records, and copy the disk. Return False if it ended first."""
    run = asyncio.ensure_future(rig.controller.run())

    def copy_disk(number: int) -> None:
        if number == record:
            rig.journal.drain()
            shutil.copytree(rig.folder, disk)
            run.cancel()

    at_each_record(rig.journal, copy_disk)
    await asyncio.wait([run], timeout=150)
    assert run.done()
    if not run.cancelled():
        run.result()
    rig.trainer.kill()
    rig.journal.close()
    return run.cancelled()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
async def test_killed_run_resumes_within_its_token_age_bound(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    scheduling, tasks, interval = drawn_scheduling(draw), drawn_tasks(draw), draw.choice([0, 0, 2, 3])
    loses_records = draw.random() < 0.25

    def rig(life: int) -> Rig:
        return Rig(
            tmp_path / str(life),
            seed + life,
            steps=6,
            interval=interval,
            tasks=tasks,
            validation=ValidationConfig(num_prompts=0),
            replica_of=UnevenReplica,
            **scheduling,
        )

    life = 0
    for _ in range(draw.choice([1, 1, 2, 3])):
        if not await killed_at(rig(life), draw.randrange(1, 150), tmp_path / str(life + 1)):
            break
        life += 1
        if loses_records:
            damaged(tmp_path / str(life), draw)
    last = rig(life)
    await last.run()
    trained = [group for step in last.trainer.weights for group in step]
    assert len(trained) == len(set(trained)) == 6 * GROUPS


def test_regenerated_group_is_reported(tmp_path: Path):
    console = ConsoleLines()
    journal = RunJournal(tmp_path)
    mix = TaskMix({"task": WeightedTask(1.0, InOrder())})
    records = GroupRecords(mix, journal, RolloutLog(RunDirectory(tmp_path), 0, console), console)
    records.discarded(3, group_of(3))
    assert console[0].startswith("group train-3 is generated again: it has tokens of version 2, which are too old")
    assert list(journal.state.unsettled) == [0, 1, 2, 3]
    journal.close()
