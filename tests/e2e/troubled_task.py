"""Alphabet sort whose first environment blocks its process once, and whose judges hang, cancel themselves and raise."""

import asyncio
import time
from typing import Any

from examples.alphabet_sort.task import AlphabetSort
from titan_rl import FailurePolicy, Reward, Rollout, Rubric

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


class TroubledSort(AlphabetSort):
    """The first step of the first environment sleeps. The weight of the judges, one of them in threads, is 0: they fail
    all the same, on a group each."""

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
            ]
        )
