"""Alphabet sort whose first environment blocks its process once, and whose judges hang, cancel themselves and raise."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from typing import TYPE_CHECKING, Any

from examples.alphabet_sort.task import AlphabetSort
from titan_rl import FailurePolicy, Reward, Rollout, Rubric

if TYPE_CHECKING:
    from e2e.runs import Run

_blocked: list[float] = []


def hangs(rollout: Rollout) -> float:
    while rollout.rollout_id == "train-1/0":
        time.sleep(1.0)
    return 0.0


async def cancels_itself(rollout: Rollout) -> float:
    if rollout.group_id == "train-2":
        call = asyncio.ensure_future(asyncio.sleep(60.0))
        call.cancel()
        await call
    return 0.0


def raises(rollout: Rollout) -> float:
    return {"validation-1": 0.0}[rollout.group_id] if rollout.group_id == "validation-0" else 0.0


def backtracks(rollout: Rollout) -> float:
    if rollout.rollout_id == "train-3/0":
        re.match(r"(a+)+$", "a" * 40 + "b")  # holds the GIL
    return 0.0


def uses_alarm(rollout: Rollout) -> float:
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.signal(signal.SIGALRM, before)
    return 0.0


class TroubledSort(AlphabetSort):
    """The first step of the first environment sleeps. The judges, one of them in threads, have weight 0 and still fail
    on one group each."""

    def make_env(self, sample: Any, renderer: Any) -> Any:
        env = super().make_env(sample, renderer)
        step = env.step

        async def sleepy_step(completion: Any) -> Any:
            if not _blocked:
                _blocked.append(8.0)
                time.sleep(8.0)  # noqa: ASYNC251
            return await step(completion)

        env.step = sleepy_step
        return env

    def rubric(self) -> Rubric:
        return Rubric(
            [
                *super().rubric().rewards,
                Reward(hangs, 0.0, in_thread=True, timeout_s=3.0),
                Reward(cancels_itself, 0.0, on_failure=FailurePolicy(retries=1, backoff_s=0.1)),
                Reward(raises, 0.0),
                Reward(backtracks, 0.0, timeout_s=7.0),
                Reward(uses_alarm, 0.0),
            ]
        )


def assert_failures_are_reported(run: Run, process: str) -> None:
    """Check that a finished run of `TroubledSort` reported each failure and lost only the affected groups.

    Args:
        run: A finished run whose other rollouts had no errors.
        process: Name of a process of its rollouts.
    """
    output = " ".join(run.output.split())  # lines are wrapped
    who = "" if process == "controller" else f"{process}: "
    assert f"{who}the event loop has been blocked for 5 s: tests/e2e/troubled_task.py:" in output
    assert "in sleepy_step blocks it" in output
    assert "time.sleep(8.0)" in (run.folder / "logs" / f"{process}.log").read_text()
    assert "reward 'hangs' took longer than 3 s on rollout 'train-1/0'" in output
    assert "reward 'cancels_itself' on rollout 'train-2/" in output
    assert "was cancelled, although nobody requested it" in output
    assert "KeyError: 'validation-0' (tests/e2e/troubled_task.py:" in output
    assert "in backtracks has held Python's interpreter lock (GIL)" in output
    assert "reward 'backtracks' took longer than 7 s on rollout 'train-3/0'" in output
    assert sum(record.get("scheduling/dropped/reward_failed", 0) for record in run.metrics()) == 3
    rollouts = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
    failed = {rollout["group_id"] for rollout in rollouts if rollout.get("dropped") == "reward_failed"}
    assert failed == {"validation-0", "train-1", "train-2", "train-3"}
    assert [each["error"] for each in rollouts if each.get("error") and each["group_id"] not in failed] == []
