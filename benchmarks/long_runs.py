"""Time and memory of the report, the resume and the journal of a run of 10,000 steps; memory should not grow with
steps.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.paired import report
from benchmarks.peaks import in_its_own_process, peak_of
from benchmarks.synthetic_run import write_run
from benchmarks.token_path import long_rollout
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.log_file import read_log
from titan_rl.run.journal.records import decode
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import DataPosition, list_segments, read_segments
from titan_rl.scheduling.task_mix import Assigned
from titan_rl.viewer.report import write_report

STEPS, ROLLOUTS_A_STEP = 10_000, 4
RECORDS = ("metrics.jsonl", "rollouts.jsonl")
LEFT = 10  # steps behind the last checkpoint, which are run again
BATCHES, GROUPS_A_BATCH, TOKENS_A_GROUP = 10, 16, 8_000


def report_peak_bytes(steps: int) -> int:
    """Peak memory of writing the report of a run, beyond the memory before it."""
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run", steps=steps, rollouts=ROLLOUTS_A_STEP * steps)
        return peak_of(lambda: write_report([run], Path(folder) / "report.html"))[0]


def records_peak_bytes(steps: int) -> int:
    """Peak memory of holding the records of such a report."""
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run", steps=steps, rollouts=ROLLOUTS_A_STEP * steps)
        return peak_of(lambda: [_records(run / name) for name in RECORDS])[0]


def _records(path: Path) -> list[Any]:
    with path.open() as lines:
        return [json.loads(line) for line in lines]


def resume_seconds(steps: int) -> tuple[float, float]:
    """Seconds that a resumed run spends on its files, without the weights and the task.

    It cuts the files back to its checkpoint, reads the journal of the steps since, and looks up its earlier metrics.
    The second figure is for reading all records and writing those that stay, without the journal.
    """
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
        run_dir.cut_records(position.version, found.state)
        again = RunJournal(run_dir.journal, position, found)
        assert again.num_batches_again == BATCHES
        assert run_dir.metric(0, "validation/reward_mean") is not None
        assert run_dir.elapsed_s > 0
        seconds = time.perf_counter() - began
        again.close()
        run_dir.close()
        began = time.perf_counter()
        for name in RECORDS:
            kept = [record for record in _records(run / name) if record.get("step", 0) <= position.version]
            (run / name).write_text("".join(f"{json.dumps(record)}\n" for record in kept))
        return seconds, time.perf_counter() - began


async def _at_checkpoint(journal: RunJournal, version: int) -> DataPosition:
    """Resumption of a run that has trained on or dropped all groups before its checkpoint."""
    for index in range(GROUPS_A_BATCH * version):
        journal.dropped(index, "trained")
    return await journal.checkpoint(version, next_index=GROUPS_A_BATCH * version)


def journal_peak_bytes(whole: bool) -> tuple[int, int]:
    """Peak memory of reading a journal file whose groups are all trained, and the size of the file.

    Args:
        whole: hold all its records.
    """

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
        if whole:
            return peak_of(lambda: [decode(record) for record in read_log(first[0])])[0], size
        return peak_of(lambda: read_segments(first, trained))[0], size


def report_long_runs() -> None:
    for name, steps in (("report_peak_mb_10k_steps", STEPS), ("report_peak_mb_1k_steps", STEPS // 10)):
        peak, whole = (in_its_own_process(work, steps) / 1e6 for work in (report_peak_bytes, records_peak_bytes))
        report(name, peak, "MB", 64, (whole, "all records held"))
    seconds, whole = in_its_own_process(resume_seconds, STEPS)
    report("resume_s_10k_steps", seconds, "s", 5, (whole, "all records read and rewritten, without the journal"))
    peak, size = in_its_own_process(journal_peak_bytes, False)
    whole, _ = in_its_own_process(journal_peak_bytes, True)
    report("journal_file_mb", size / 1e6, "MB")
    report("journal_read_peak_mb", peak / 1e6, "MB", 32, (whole / 1e6, "all its records held"))


if __name__ == "__main__":
    report_long_runs()
