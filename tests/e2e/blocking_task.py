"""Alphabet sort with an environment that blocks its process once."""

import time
from typing import Any

from examples.alphabet_sort.task import AlphabetSort

_blocked: list[float] = []


class BlockingSort(AlphabetSort):
    """The first step of the first environment sleeps."""

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
