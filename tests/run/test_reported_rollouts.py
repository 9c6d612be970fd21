"""Reports about rollouts: rewards before the filters, errors with their lines, and dropped groups."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from background import HANG_S
from kept_metrics import KeptMetrics
from test_controller import Counting, FakeReplica, FakeTrainer
from test_readme_examples import CountDown

from titan_rl import Completion, GeneratorRouter, Reward, Rollout, Rollouter, Rubric
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import SamplingConfig, ValidationConfig
from titan_rl.config.tasks import TaskSource, name_of
from titan_rl.core.errors import RewardError, TrainingError
from titan_rl.metrics.sinks.settings import LoggingConfig
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.controller import Controller
from titan_rl.run.directory import RunDirectory, read_jsonl
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.summary import RunSummary
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.weights.types import PublishedWeights

Record = dict[str, Any]


class ByIndex(Counting):
    """Task whose samples are positions in the data; held-out samples are negative."""

    def train_sample(self, seed: int, index: int) -> int:
        return index

    def validation_samples(self, count: int) -> list[int]:
        return [-1 - number for number in range(count)]


class OneTurn(CountDown):
    def __init__(self, sample: int) -> None:
        super().__init__(1)
        self.sample = sample


class Run:
    """Run of two groups of two rollouts per step, and its output."""

    def __init__(
        self,
        folder: Path,
        *,
        make_env: Callable[[int], CountDown] = OneTurn,
        reward: Callable[[Rollout], float] = lambda rollout: float(rollout.sibling),
        rubric: Rubric | None = None,
        group_size: int = 2,
        task: ByIndex = ByIndex(),  # noqa: B008  frozen
        num_prompts: int = 4,
        transcripts_per_step: int = 4,
        steps: int = 2,
        replica: FakeReplica | None = None,
        start: RunState = RunState(),  # noqa: B008  frozen
        **scheduling: Any,
    ) -> None:
        settings = {"groups_per_step": 2, "max_staleness": 0, **scheduling}
        config = RunConfig(
            model=ModelConfig(path="unused", max_context=16),
            tasks=[TaskSource(task=task)],  # pyright: ignore[reportArgumentType]
            sampling=SamplingConfig(max_tokens=1),
            rollout=RolloutConfig(group_size=group_size),
            scheduling=SchedulingConfig(**settings),
            training=TrainingConfig(steps=steps, row_tokens=16),
            validation=ValidationConfig(num_prompts=num_prompts, samples_per_prompt=2, interval=2),
            logging=LoggingConfig(transcripts_per_step=transcripts_per_step),
        )
        self.run_dir = RunDirectory(folder / "run")
        trainer = FakeTrainer()
        trainer.version = start.step
        self.records = KeptMetrics()
        self.output = folder / "output.txt"
        self._file = self.output.open("w")
        self.controller = Controller(
            config,
            group_runners={
                name_of(type(task).__name__): Rollouter(
                    make_env, rubric or Rubric([Reward(reward, name="reward")]), max_context=16
                )
            },
            router=GeneratorRouter([replica or FakeReplica()]),
            trainer=trainer,
            stop_token_ids=[],
            published=PublishedWeights(),
            run_dir=self.run_dir,
            sinks=self.records,
            progress=Progress(steps, self._file),
            journal=RunJournal(self.run_dir.journal, start.position),
            start=start,
        )

    async def run(self) -> RunSummary:
        try:
            return await asyncio.wait_for(self.controller.run(), HANG_S)
        finally:
            self._file.close()

    def summary(self) -> RunSummary:
        for step, metrics in self.records:
            self.run_dir.write_metrics(step, metrics)
        return RunSummary(0.0, 1.0, 2, 16, 1.0, self.run_dir.path)

    def rollouts(self) -> list[Record]:
        return read_jsonl(self.run_dir.rollouts)

    def metric(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in self.records if name in metrics]


def solved(rollout: Rollout) -> float:
    """Reward with which every other group is solved by all siblings, and so teaches nothing."""
    return 1.0 if rollout.sample % 2 else float(rollout.sibling)


async def test_reported_reward_covers_all_finished_groups(tmp_path):
    run = Run(tmp_path, reward=solved, filters=["zero_variance"], steps=1)
    await run.run()
    (trained,), (finished,) = run.metric("rollout/reward_mean"), run.metric("rollout/finished_reward_mean")
    num_finished = run.metric("rollout/finished_groups")[0]
    assert trained == 0.5
    assert finished == pytest.approx((2 * 0.5 + (num_finished - 2) * 1.0) / num_finished)
    assert num_finished >= 3
    assert f"reward {finished:.3f} (trained on 0.500)" in run.output.read_text()


async def test_reported_reward_equals_trained_reward_without_drops(tmp_path):
    run = Run(tmp_path, reward=lambda rollout: float(rollout.sibling * (abs(rollout.sample) % 7)), max_staleness=1)
    await run.run()
    assert run.metric("rollout/finished_reward_mean") == run.metric("rollout/reward_mean")
    assert "(trained on" not in run.output.read_text()


async def test_dropped_groups_are_written_with_the_reason(tmp_path):
    run = Run(tmp_path, reward=solved, filters=["zero_variance"])
    await run.run()
    dropped = [record for record in run.rollouts() if record.get("dropped")]
    assert {record["dropped"] for record in dropped} == {"zero_variance"}
    assert {record["group_id"] for record in dropped} >= {"train-1"}
    assert all(record["reward"] == 1.0 and record["phase"] == "train" and record["step"] >= 1 for record in dropped)
    kept = {record["group_id"] for record in run.rollouts() if record["phase"] == "train"} - {
        record["group_id"] for record in dropped
    }
    assert kept == {"train-0", "train-2", "train-4", "train-6"}


class Broken(OneTurn):
    async def reset(self) -> Any:
        raise ConnectionError(f"sandbox {self.sample} is gone")


class BrokenInTraining(OneTurn):
    async def reset(self) -> Any:
        if self.sample >= 0:
            raise ConnectionError(f"sandbox {self.sample} is gone")
        return await super().reset()


async def test_failing_environment_is_reported_once_with_its_line(tmp_path, caplog):
    run = Run(tmp_path, make_env=Broken)
    with caplog.at_level(logging.WARNING), pytest.raises(TrainingError) as ended:
        await run.run()
    assert "8 of 8 rollouts were lost to errors, all of them to error_env: ConnectionError: sandbox -" in str(
        ended.value
    )
    assert "test_reported_rollouts.py:" in str(ended.value)
    assert "in reset)" in str(ended.value)
    written = run.rollouts()
    assert len(written) == 8
    assert all(record["status"] == "error_env" and "sandbox" in record["error"] for record in written)
    assert all(record["error_at"].endswith("in reset") for record in written)
    traces = [record for record in caplog.records if "Traceback" in record.getMessage()]
    assert len(traces) == 1, "once for the error, and not for each rollout"
    assert 'raise ConnectionError(f"sandbox {self.sample} is gone")' in traces[0].getMessage()
    shown = run.output.read_text()
    assert shown.count("ConnectionError: sandbox") == 2  # when it first happened, and at the end
    assert "8 rollouts ended in error_env: ConnectionError" in shown


async def test_failed_training_groups_are_written_before_the_run_ends(tmp_path):
    run = Run(tmp_path, make_env=BrokenInTraining, max_failed_groups=3)
    with pytest.raises(ExceptionGroup) as ended:
        await run.run()
    assert ended.group_contains(TrainingError)
    failed = [record for record in run.rollouts() if record["phase"] == "train"]
    assert {record["group_id"] for record in failed} >= {"train-0", "train-1", "train-2"}
    assert all(record["dropped"] == "failed" and record["status"] == "error_env" for record in failed)


class BrokenNowAndThen(OneTurn):
    async def reset(self) -> Any:
        if self.sample == -1:
            raise ConnectionError("one sandbox is gone")
        return await super().reset()


class FlakyInTraining(OneTurn):
    """Environment of which every second one in training is lost before its first turn."""

    num_made = 0

    async def reset(self) -> Any:
        FlakyInTraining.num_made += 1
        if self.sample >= 0 and FlakyInTraining.num_made % 2:
            raise ConnectionError("one sandbox is gone")
        return await super().reset()


async def test_reward_of_a_flaky_environment_is_the_reward_of_its_finished_rollouts(tmp_path):
    rubric = Rubric([Reward(lambda rollout: 1.0, name="reward")], error_reward=0.0)
    run = Run(tmp_path, make_env=FlakyInTraining, rubric=rubric, group_size=4)
    await run.run()
    assert run.metric("rollout/finished_reward_mean") == [1.0, 1.0]
    assert all(share > 0.1 for share in run.metric("rollout/finished_fault_fraction"))
    assert run.metric("rollout/turns_mean") == [1.0, 1.0]
    shown = run.output.read_text()
    assert re.search(r"step 1/2  reward 1\.000 \(\d+% ended in an error; \d+% left out as faults\)", shown)
    assert re.search(r"^\d+ of \d+ rollouts, which no reward above includes$", run.summary().rows["faults"])


async def test_validation_reports_rollouts_left_out_of_its_mean(tmp_path):
    run = Run(tmp_path, make_env=BrokenNowAndThen, transcripts_per_step=0)
    await run.run()
    assert run.metric("validation/unscored") == [2.0, 2.0]
    assert run.metric("validation/reward_mean") == [0.5, 0.5]
    shown = run.output.read_text()
    assert (
        "reward 0.500 ± 0.000, without those that failed: 2 of 8 rollouts were lost to errors, all of them to error_env"
        in shown
    )
    written = [(record["step"], record["status"]) for record in run.rollouts()]
    assert written == [(0, "error_env")] * 2 + [(2, "error_env")] * 2, "errors are written even without transcripts"


class Repeated(ByIndex):
    """Task with two distinct held-out samples, which differ in an id that its key leaves out."""

    def validation_samples(self, count: int) -> list[int]:
        return [-1 - number for number in range(count)]

    def key(self, sample: int) -> str:
        return "odd" if sample % 2 else "even"


async def test_validation_error_is_clustered_by_distinct_prompt_and_few_are_warned_of(tmp_path):
    run = Run(tmp_path, task=Repeated(), reward=lambda rollout: float(rollout.sample % 2), num_prompts=8)
    await run.run()
    assert run.metric("validation/distinct_prompts") == [2.0, 2.0]
    assert run.metric("validation/reward_error") == [0.5, 0.5], "of two prompts with rewards 0 and 1"
    shown = run.output.read_text()
    assert "validation at step 2: reward 0.500 ± 0.500" in shown
    assert shown.count("warning: validation: the 8 held-out prompts are only 2 different ones, repeated") == 1


@pytest.mark.parametrize("failing", [{-1}, {-1, -2, -3, -4}])
async def test_validation_groups_with_failed_rewards_are_written_once(tmp_path, failing):
    def reward(rollout: Rollout) -> float:
        if rollout.sample in failing:
            raise ConnectionError("the judge is gone")
        return float(rollout.sibling)

    run = Run(tmp_path, reward=reward, transcripts_per_step=1, steps=1)
    if len(failing) == 4:
        with pytest.raises((RewardError, ExceptionGroup)):
            await run.run()
    else:
        await run.run()
    lost = [
        record["group_id"]
        for record in run.rollouts()
        if (record["step"], record["phase"], record.get("dropped")) == (0, "validation", "reward_failed")
    ]
    assert len(lost) == 2 * len(failing), "two siblings each"
    assert len(set(lost)) == len(failing)
    in_full = [r for r in run.rollouts() if (r["step"], r["phase"]) == (0, "validation") and not r.get("dropped")]
    assert len(in_full) == (0 if len(failing) == 4 else 2)


async def test_failed_transcript_writes_do_not_end_the_run(tmp_path):
    run = Run(tmp_path)
    run.run_dir.rollouts.mkdir()  # cannot be opened as a file
    await run.run()
    assert run.metric("train/loss") == [0.0, 0.0]
    assert run.metric("transcripts/lost")[-1] > 0
    shown = run.output.read_text()
    assert shown.count("writing rollouts.jsonl failed, and the run continues without it: IsADirectoryError") == 1
    assert "writing rollouts.jsonl failed 24 times in this run" in shown


class SlowReplica(FakeReplica):
    async def generate(self, prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        for _ in range(20):  # until all other requests are in flight
            await asyncio.sleep(0)
        return await super().generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)


async def test_peak_requests_in_flight_is_reported(tmp_path):
    run = Run(tmp_path, replica=SlowReplica())
    await run.run()
    assert run.metric("generation/requests_in_flight_max") == [8.0, 4.0]  # validation has 8, a step 4
    assert run.metric("rollout/branches_per_rollout") == [1.0, 1.0]


@pytest.mark.parametrize(("validated", "expected"), [(False, [2, 4]), (True, [4])])
async def test_interrupted_validation_is_repeated_on_resume(tmp_path, validated, expected):
    run = Run(tmp_path, steps=4, start=RunState(step=2, reward_before=0.5, next_index=4))
    if validated:
        run.run_dir.write_metrics(2, {"validation/reward_mean": 0.5})
    await run.run()
    assert [step for step, metrics in run.records if "validation/reward_mean" in metrics] == expected


async def test_run_stopped_during_its_last_save_does_not_validate_again(tmp_path):
    run = Run(tmp_path, steps=2, start=RunState(step=2, reward_before=0.25, next_index=4))
    run.run_dir.write_metrics(2, {"validation/reward_mean": 0.75})
    summary = await run.run()
    assert (summary.reward_before, summary.reward_after) == (0.25, 0.75)
    assert run.records == run.rollouts() == []
