"""Reward functions and environments written for TRL."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from background import HANG_S
from trl.rewards import get_soft_overlong_punishment

calls: list[dict[str, Any]] = []  # the arguments of `remembered`


overlong = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=5)


def remembered(prompts, completions, completion_ids, **columns) -> list[float]:
    given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    calls.append({**given, **columns})
    return [0.0] * len(prompts)


def is_right(completions, answer, **kwargs) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def of_long_ones(completions, log_metric, log_extra, **kwargs) -> list[float | None]:
    log_metric("longest", max(map(len, completions)))
    log_extra("length", [len(text) for text in completions])
    log_extra("first_word", [text.partition(" ")[0] for text in completions])
    return [None if len(text) < 3 else 0.5 for text in completions]


def forgets_its_return(completions, **kwargs) -> None:
    pass


def logs_too_few(completions, log_extra, **kwargs) -> list[float]:
    log_extra("length", [1.0])
    return [1.0] * len(completions)


def never(completions, **kwargs) -> list[None]:
    return [None] * len(completions)


async def slowly(prompts, completions, **kwargs) -> list[float]:
    await asyncio.sleep(0)
    return [len(prompt) - len(text) / 10 for prompt, text in zip(prompts, completions, strict=True)]


def too_few(completions, **kwargs) -> list[float]:
    return [0.0] * (len(completions) - 1)


def thread(completions, **kwargs) -> list[float]:
    return [float(threading.get_ident())] * len(completions)


class Judge:
    """Callable reward whose two calls must run concurrently: the first waits for the second."""

    def __init__(self) -> None:
        self.asked: asyncio.Event | None = None

    async def __call__(self, completions, **kwargs) -> list[float]:
        if self.asked is None:
            self.asked = asyncio.Event()
            await asyncio.wait_for(self.asked.wait(), HANG_S)
        else:
            self.asked.set()
        return [1.0] * len(completions)


judge = Judge()
same_judge = judge


class Counter:
    """Environment in which the policy counts up to the number of the row."""

    def __init__(self) -> None:
        self.count = 0
        self.closed = 0
        self.rewards_asked = 0

    def reset(self, target: int, **columns: Any) -> str | None:
        self.target = target
        self.columns = columns
        return f" Count to {target}." if target else None

    def add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: what to add
        """
        if number < 0:
            raise ValueError("only upwards")
        self.count += number
        return self.count

    async def look(self) -> str:
        """Say the count."""
        return f"It is {self.count}"

    def _secret(self) -> None: ...

    def get_reward(self) -> float:
        self.rewards_asked += 1
        return float(self.count == self.target)

    def close(self) -> None:
        self.closed += 1


class Plain:
    """Environment without `get_reward`."""

    def reset(self, **columns: Any) -> None: ...

    def wait(self) -> str:
        """Do nothing."""
        return "done"


class NoReset:
    def wait(self) -> str:
        """Do nothing."""
        return "done"


def counted(environments, **kwargs) -> list[float]:
    return [environment.count / 10 for environment in environments]


at_counting = asyncio.Event()


async def counted_later(environments, **kwargs) -> list[float]:
    """Block forever on the first call."""
    if not at_counting.is_set():
        at_counting.set()
        await asyncio.Event().wait()
    return counted(environments)


def kinds(environments, **kwargs) -> list[float]:
    return [float(type(environment).__name__ == "Plain") for environment in environments]
