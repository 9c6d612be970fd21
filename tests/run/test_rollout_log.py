"""Rollout log: limits on the errors and dropped groups that are written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl import Rollout, RolloutGroup, RolloutStatus
from titan_rl.core.calls.user_code import Failure
from titan_rl.core.console import ConsoleLines
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.rollout_log import FIRST_OF_A_KIND, RolloutLog


def errored(group: int, sibling: int, where: str) -> Rollout:
    rollout = Rollout(f"g{group}/{sibling}", f"g{group}", sibling, None, RolloutStatus.ERROR_ENV)
    rollout.failure = Failure(f"ValueError: row {group}", where, "Traceback ...")
    rollout.error = rollout.failure.error
    return rollout


def group_of(group: int, where: str) -> RolloutGroup:
    return RolloutGroup(f"g{group}", None, [errored(group, sibling, where) for sibling in range(4)])


def test_first_errors_of_each_kind_are_written_and_others_counted():
    records: list[dict[str, Any]] = []
    run_dir: Any = SimpleNamespace(write_rollout=lambda record: records.append(dict(record)))
    log = RolloutLog(run_dir, 0, ConsoleLines())
    for number in range(100):
        log.dropped(group_of(number, "env.py:1 in reset"), "failed", step=3)
    log.dropped(group_of(100, "env.py:2 in step"), "failed", step=3)
    assert len(records) == FIRST_OF_A_KIND + 4
    assert {record["error_at"] for record in records} == {"env.py:1 in reset", "env.py:2 in step"}
    assert log.figures()["transcripts/left_out"] == 400 - FIRST_OF_A_KIND
    assert log.figures()["transcripts/left_out"] == 0
    log.dropped(group_of(101, "env.py:1 in reset"), "failed", step=4)
    assert len(records) == FIRST_OF_A_KIND + 8, "the limit is per step"


def test_error_is_shown_once_and_counted_at_the_end(tmp_path: Path):
    console = ConsoleLines()
    log = RolloutLog(RunDirectory(tmp_path), 0, console)
    for sibling in range(3):
        log.ended(errored(0, sibling, "env.py:1 in reset"))
    log.ended(errored(1, 0, "env.py:2 in step"))
    assert console == [
        "rollout g0/0 ended in error_env: ValueError: row 0 (env.py:1 in reset)",
        "rollout g1/0 ended in error_env: ValueError: row 1 (env.py:2 in step)",
    ]
    log.close()
    assert console[2:] == [
        "3 rollouts ended in error_env: ValueError: row 0 (env.py:1 in reset), and others with 1 other kinds of error; "
        "logs/controller.log has every error in full"
    ]


def test_long_error_is_shortened_only_on_the_console(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    console = ConsoleLines()
    log = RolloutLog(RunDirectory(tmp_path), 0, console)
    frames = [f"  File agent.py, line {number}, ^^^^" for number in range(200)]
    last = "ValueError: no such city (runs/r/agents/g.0/output.txt)"
    error = "\n".join(["it ended with exit code 1: Traceback", *frames, last])
    rollout = Rollout("g/0", "g", 0, None, RolloutStatus.ERROR_ENV, error=error)
    log.ended(rollout)
    log.close()
    assert console[0].startswith("rollout g/0 ended in error_env: it ended with exit code 1: Traceback\n")
    assert console[0].endswith(f"line 199, ^^^^\n{last}")
    assert len(console[0]) < 1000
    assert console[1].startswith(f"1 rollouts ended in error_env: it ended with exit code 1: Traceback ... {last}; ")
    assert error in caplog.text


def test_parse_errors_are_not_shown_as_environment_errors(tmp_path: Path):
    console = ConsoleLines()
    log = RolloutLog(RunDirectory(tmp_path), 0, console)
    log.ended(Rollout("g/0", "g", 0, None, RolloutStatus.ERROR_PARSE))
    log.ended(Rollout("g/1", "g", 1, None, RolloutStatus.COMPLETED))
    log.close()
    assert console == []
