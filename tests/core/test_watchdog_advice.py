"""Advice of the watchdog, which depends on the kind of code that blocks the event loop."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from titan_rl import (
    Completion,
    FinishReason,
    GroupReward,
    Reward,
    RolloutGroup,
    RolloutStatus,
    Rubric,
    SamplingParams,
    TokenObservation,
    TokenStep,
    VersionSpan,
)
from titan_rl.config.load import load_config
from titan_rl.config.tasks import TaskSource
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.console import Console
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.task import drop_reason
from titan_rl.run.stages.rollout_stage import RolloutStage
from titan_rl.scheduling.filters import find_filter, first_reason

ADVICE = {
    "environment": "rollout.env_in_thread = true",
    "reward": "in_thread=True",
    "task": "when the task is made",
}
ADVICE |= {"advantage": "must only compute", "generate": "asyncio.to_thread", "on_finished": "asyncio.to_thread"}


class Blocker(Console):
    """Blocks in one place until the watchdog has sent a message."""

    def __init__(self, where: str) -> None:
        self.messages: list[str] = []
        self._where = where
        self._heard = threading.Event()

    def warning(self, text: str) -> None:
        self.messages.append(text)
        self._heard.set()

    def __call__(self, where: str) -> None:
        if where == self._where:
            assert self._heard.wait(30)


class Env:
    def __init__(self, block: Blocker) -> None:
        self._block = block
        block("make_env")

    async def reset(self) -> TokenObservation:
        self._block("reset")
        return TokenObservation([1])

    async def step(self, completion: Completion) -> TokenStep:
        self._block("step")
        return TokenStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None:
        self._block("close")


async def play(block: Blocker) -> None:
    async def judge(rollout: Any) -> float:
        block("async reward")
        return 0.0

    def judge_at_once(rollout: Any) -> float:
        block("reward")
        return 0.0

    def judge_group(rollouts: Any) -> list[float]:
        block("group reward")
        return [0.0] * len(rollouts)

    def advantage(rewards: Any) -> list[float]:
        block("advantage")
        return [0.0] * len(rewards)

    async def generate(prompt_token_ids: Any, *, request_id: str, **kwargs: Any) -> Completion:
        block("generate")
        return Completion(request_id, [5], [-0.5], FinishReason.STOP, (VersionSpan(0, 1),))

    rubric = Rubric([Reward(judge), Reward(judge_at_once), GroupReward(judge_group)])
    rollouter = Rollouter(lambda _: Env(block), rubric, max_context=9, advantage=advantage)
    await rollouter.run_group(
        generate,
        None,
        group_id="g",
        group_size=1,
        sampling=SamplingParams(max_tokens=4),
        on_finished=lambda _: block("on_finished"),
    )


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        *((where, "environment") for where in ("make_env", "reset", "step", "close")),
        *((where, "reward") for where in ("reward", "async reward", "group reward")),
        *((where, where) for where in ("advantage", "generate", "on_finished")),
    ],
)
async def test_advice_for_code_called_by_a_rollout(where: str, kind: str) -> None:
    block = Blocker(where)
    with LoopWatchdog(block, blocked_after_s=0.05):
        await play(block)
    assert block.messages[0].count("test_watchdog_advice.py:") == 1
    assert [name for name, advice in ADVICE.items() if advice in block.messages[0]] == [
        name for name, advice in ADVICE.items() if advice == ADVICE[kind]
    ]


class Data:
    def __init__(self, block: Blocker) -> None:
        self._block = block

    def train_sample(self, seed: int, index: int) -> int:
        self._block("train_sample")
        return index

    def validation_samples(self, count: int) -> list[Any]:
        self._block("validation_samples")
        return []

    def drop_reason(self, group: Any) -> str | None:
        self._block("drop_reason")

    def make_env(self, sample: Any, renderer: Any) -> Any: ...

    def rubric(self) -> Any: ...


@pytest.mark.parametrize("where", ["train_sample", "validation_samples", "drop_reason"])
async def test_advice_for_functions_of_a_task(where: str) -> None:
    block = Blocker(where)
    task: Any = Data(block)
    unused = cast("Any", None)
    config = load_config(Path(__file__).parents[2] / "examples/alphabet_sort/cpu.toml", check_files=False)
    config = config.model_copy(update={"tasks": (TaskSource(task=task, name="data"),)})
    groups = RolloutStage(
        config,
        unused,
        group_runners=unused,
        router=unused,
        journal=unused,
        stop_token_ids=(),
        transcripts=unused,
    )
    with LoopWatchdog(block, blocked_after_s=0.05):
        groups.train_sample("data", 3)
        groups.validation_samples(config.suites[0])
        drop_reason(task, RolloutGroup("g", None, []))
    assert f"in {where} blocks it" in block.messages[0] or "in __call__ blocks it" in block.messages[0]
    assert ADVICE["task"] in block.messages[0]
    assert "in_thread" not in block.messages[0]


async def test_advice_for_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Blocker("filter")

    def slow(group: RolloutGroup) -> None:
        block("filter")

    monkeypatch.setitem(sys.modules, "own_filters", cast("Any", SimpleNamespace(slow=slow)))
    with LoopWatchdog(block, blocked_after_s=0.05):
        first_reason([find_filter("own_filters:slow")], RolloutGroup("g", None, []))
    assert "must only inspect its group" in block.messages[0]
