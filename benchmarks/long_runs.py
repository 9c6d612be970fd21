"""What a run of 10,000 steps takes to be told of, and to go on: seconds, and memory that its steps should not fill."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.paired import report
from benchmarks.synthetic_run import write_run
from benchmarks.token_path import long_rollout
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.journal_state import read_segments
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.run_state import DataPosition
from titan_rl.run.journal.segments import list_segments
from titan_rl.scheduling.mix.events import Assigned
from titan_rl.viewer.report import write_report

T = TypeVar("T")

STEPS, ROLLOUTS_A_STEP = 10_000, 4
LEFT = 10  # steps behind the last checkpoint, which are run again
BATCHES, GROUPS_A_BATCH, TOKENS_A_GROUP = 10, 16, 8_000


def in_its_own_process(work: Callable[..., T], *args: Any) -> T:
    """So that the peak of one is not the other's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)


def report_peak_bytes(steps: int) -> int:
    """Of writing the report of a run, beyond what the process had before."""
    from benchmarks.large import peak_of

    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run", steps=steps, rollouts=ROLLOUTS_A_STEP * steps)
        return peak_of(lambda: write_report([run], Path(folder) / "report.html"))[0]


def resume_seconds(steps: int = STEPS) -> float:
    """What a run that goes on does with its files: it cuts them back to its checkpoint, reads the journal of the steps
    since, and looks up what it has measured. The weights and the task are left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder), steps=steps, rollouts=ROLLOUTS_A_STEP * steps)
        journal = RunJournal(run / "journal")
        position = asyncio.run(_at_checkpoint(journal, steps - LEFT))
        index = position.next_index
        for batch in range(BATCHES):
            indices = list(range(index, index + GROUPS_A_BATCH))
            for each in indices:
                group = RolloutGroup(f"train-{each}", None, [long_rollout(1, TOKENS_A_GROUP)])
                journal.finished(Assigned(each, "task", each), group)
            journal.batch(position.version + batch, indices)
            index += GROUPS_A_BATCH
        journal.close()
        began = time.perf_counter()
        run_dir = RunDirectory(run)
        found = read_segments(list_segments(run_dir.journal), position)
        run_dir.cut_records(position.version, lambda group_id: True)
        again = RunJournal(run_dir.journal, position, found)
        assert again.num_batches_again == BATCHES
        assert run_dir.metric(0, "validation/reward_mean") is not None
        assert run_dir.elapsed_s > 0
        seconds = time.perf_counter() - began
        again.close()
        run_dir.close()
        return seconds


async def _at_checkpoint(journal: RunJournal, version: int) -> DataPosition:
    """Of a run that has trained or dropped all groups before it."""
    for index in range(GROUPS_A_BATCH * version):
        journal.dropped(index, "trained")
    return await journal.checkpoint(version, next_index=GROUPS_A_BATCH * version)


def journal_peak_bytes() -> tuple[int, int]:
    """The most that reading a file of a journal takes whose groups are all trained, and the bytes of the file."""
    from benchmarks.large import peak_of

    async def write(folder: Path) -> DataPosition:
        journal = RunJournal(folder)
        for index in range(BATCHES * GROUPS_A_BATCH):
            group = RolloutGroup(f"train-{index}", None, [long_rollout(1, 8 * TOKENS_A_GROUP)])
            journal.finished(Assigned(index, "task", index), group)
            await asyncio.sleep(0)
        journal.drain()
        position = await journal.checkpoint(1, next_index=BATCHES * GROUPS_A_BATCH)
        journal.close()
        return position

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "journal"
        position = asyncio.run(write(folder))
        trained = DataPosition(position.version, position.next_index, (), position.run)
        first = list_segments(folder)[:1]
        size = first[0].stat().st_size
        return peak_of(lambda: read_segments(first, trained))[0], size


def report_long_runs() -> None:
    report("report_peak_mb_10k_steps", in_its_own_process(report_peak_bytes, STEPS) / 1e6, "MB", 64)
    report("report_peak_mb_1k_steps", in_its_own_process(report_peak_bytes, STEPS // 10) / 1e6, "MB", 64)
    report("resume_s_10k_steps", in_its_own_process(resume_seconds), "s", 5)
    peak, size = in_its_own_process(journal_peak_bytes)
    report("journal_file_mb", size / 1e6, "MB")
    report("journal_read_peak_mb", peak / 1e6, "MB", 32)


if __name__ == "__main__":
    report_long_runs()
