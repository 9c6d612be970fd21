"""Rollout stage: every session that the router has seen is finished."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from background import HANG_S
from test_controller import Counting, FakeReplica
from test_readme_examples import CountDown

from titan_rl import GeneratorRouter, Rollouter
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import SamplingConfig, ValidationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.console import ConsoleLines
from titan_rl.generation.router.strategies import LeastLoaded
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.observability.rollout_log import RolloutLog
from titan_rl.run.stages.rollout_stage import RolloutStage
from titan_rl.scheduling.curriculum import InOrder
from titan_rl.scheduling.task_mix import TaskMix, WeightedTask
from titan_rl.training.settings import ModelConfig


class RecordingStrategy(LeastLoaded):
    """Strategy that records the sessions that it serves and those that are finished."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: set[str] = set()
        self.finished: Counter[str] = Counter()

    def choose(self, session_id: str | None, cost: int) -> Any:
        assert session_id is not None
        self.begun.add(session_id)
        return super().choose(session_id, cost)

    def finish_session(self, session_id: str) -> None:
        self.finished[session_id] += 1


class Flaky(CountDown):
    """Environment whose sandbox is gone in every other instance."""

    made = 0

    def __init__(self, sample: int) -> None:
        super().__init__(sample)
        Flaky.made += 1
        self._fails = Flaky.made % 2 == 1

    async def step(self, completion: Any) -> Any:
        if self._fails:
            raise ConnectionError("the sandbox is gone")
        return await super().step(completion)


async def test_sessions_of_retried_rollouts_are_finished_too(tmp_path: Path) -> None:
    task, strategy = Counting(), RecordingStrategy()
    limits = RolloutConfig(max_retries=8)
    config = RunConfig(
        model=ModelConfig(path="unused", max_context=16),
        tasks=[TaskSource(task=task)],  # pyright: ignore[reportArgumentType]
        sampling=SamplingConfig(max_tokens=1),
        rollout=limits,
        validation=ValidationConfig(num_prompts=1, samples_per_prompt=4),
    )
    router = GeneratorRouter([FakeReplica()], strategy)
    await router.pull_state_dict(0)
    groups = RolloutStage(
        config,
        TaskMix({"counting": WeightedTask(1.0, InOrder())}),
        group_runners={"counting": Rollouter(Flaky, task.rubric(), max_context=16, limits=limits)},
        router=router,
        journal=RunJournal(tmp_path),
        stop_token_ids=[],
        transcripts=RolloutLog(RunDirectory(tmp_path), 0, ConsoleLines()),
    )
    validation = groups.run_validation_group(config.suites[0], "validation-0", 4)
    group = await asyncio.wait_for(validation, HANG_S)
    assert any(rollout.metrics["retries"] for rollout in group.rollouts)
    assert any("~" in session_id for session_id in strategy.begun)
    assert strategy.finished == Counter(strategy.begun)
