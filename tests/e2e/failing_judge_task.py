"""Alphabet sort with a judge in threads that hangs, one that cancels itself, and one that raises, on a group each."""

import asyncio
import time

from examples.alphabet_sort.task import AlphabetSort
from titan_rl import FailurePolicy, Reward, Rollout, Rubric


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


class FailingJudges(AlphabetSort):
    """Their weight is 0: they fail all the same."""

    def rubric(self) -> Rubric:
        return Rubric(
            [
                *super().rubric().rewards,
                Reward(hangs, 0.0, in_thread=True, timeout_s=3.0),
                Reward(cancels_itself, 0.0, on_failure=FailurePolicy(retries=1, backoff_s=0.1)),
                Reward(raises, 0.0),
            ]
        )
