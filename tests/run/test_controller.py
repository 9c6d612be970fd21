"""Controller of a run, on a fake trainer and replicas that record their calls."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from background import HANG_S
from kept_metrics import KeptMetrics
from test_readme_examples import CountDown, count_down

from titan_rl import (
    Completion,
    EngineLoop,
    FinishReason,
    GeneratorRouter,
    LocalReplica,
    Reward,
    Rollout,
    Rollouter,
    RolloutGroup,
    Rubric,
    VersionSpan,
)
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import CheckpointConfig, GenerationConfig, SamplingConfig, ValidationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.errors import (
    CheckpointError,
    DataError,
    NoSpaceError,
    RewardError,
    StateDictError,
    TrainingError,
)
from titan_rl.core.settings import Section
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.controller import Controller
from titan_rl.run.directory import RunDirectory, read_jsonl
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.summary import show_summary
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer_protocol import SkippedMinibatch, StepResult
from titan_rl.weights.types import Manifest, PublishedWeights


class Counting(Section):
    """Count down from a number."""

    def train_sample(self, seed: int, index: int) -> int:
        return 2 + (seed + index) % 3

    def validation_samples(self, count: int) -> list[int]:
        return [4] * count

    def make_env(self, sample: int, renderer: object) -> CountDown:
        return CountDown(sample)

    def rubric(self) -> Rubric:
        return Rubric([Reward(lambda rollout: len(rollout.turns) + rollout.sibling, name="turns")])


class FakeTrainer:
    """Trainer that counts versions and records the samples of each step and the saved versions."""

    def __init__(self) -> None:
        self.version = 0
        self.trained: list[list[Any]] = []
        self.saved: list[int] = []
        self.exported: list[Path] = []
        self.fail_to_save = False
        self.stepped = asyncio.Event()
        self._stepped: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.published = 0
        self.saving = 0

    async def step(self, samples: Sequence[Any]) -> StepResult:
        self.trained.append(list(samples))
        staleness = [self.version - v for sample in samples for v in sample.versions if v >= 0]
        self.version += 1
        self.stepped.set()
        self._stepped[self.version].set()
        return StepResult(self.version, {"loss": 0.0, "staleness_mean": float(max(staleness))})

    async def until(self, version: int) -> None:
        await self._stepped[version].wait()

    async def begin_publish(self) -> None:
        self.published = self.version

    async def finish_publish(self) -> Manifest:
        return Manifest(self.published, ())

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        self.saving = self.version
        return self.version

    async def finish_save(self) -> None:
        if self.fail_to_save:
            raise CheckpointError("no space left")
        self.saved.append(self.saving)

    async def export(self, path: Path) -> None:
        self.exported.append(path)


class FakeReplica:
    """Replica that answers with the version it last pulled."""

    name = "replica"

    def __init__(self, refuse: int | None = None) -> None:
        self.version = -1
        self.pulled: list[int] = []
        self.asked_for_experts: dict[str, bool] = {}
        self.hold: asyncio.Event | None = None
        self._refuse = refuse

    async def generate(self, prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        if self.hold is not None and request_id.startswith("train"):
            await self.hold.wait()
        self.asked_for_experts[request_id.split("-")[0]] = sampling.return_routed_experts
        answer = await count_down(prompt_token_ids, request_id=request_id, sampling=sampling)
        experts = [[[3, 1]]] if sampling.return_routed_experts else None
        spans = [VersionSpan(self.version, 1)]
        return Completion(request_id, answer.token_ids, [-0.5], FinishReason.STOP, spans, experts)

    async def pull(self, version: int) -> None:
        if version == self._refuse:
            raise StateDictError("torn")
        self.version = version
        self.pulled.append(version)

    async def pause(self, mode) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids) -> None: ...

    async def close(self) -> None: ...


class Rig:
    """A controller of 2 groups a step, on fakes."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int = 4,
        staleness: int = 0,
        rubric: Rubric | None = None,
        task: Counting | None = None,
        refuse: int | None = None,
        generation: GenerationConfig | None = None,
        checkpoint_interval: int = 3,
        held_out: int = 2,
        replica: Any = None,
        trainer: FakeTrainer | None = None,
        training: dict[str, Any] | None = None,
        keep: Any = 2,
        start: RunState = RunState(),  # noqa: B008  frozen
    ) -> None:
        task = task or Counting()
        config = self.config = RunConfig(
            model=ModelConfig(path="unused", max_context=16),
            tasks=[TaskSource(task=task)],  # pyright: ignore[reportArgumentType]
            sampling=SamplingConfig(max_tokens=1),
            rollout=RolloutConfig(group_size=3),
            scheduling=SchedulingConfig(groups_per_step=2, max_staleness=staleness),
            training=TrainingConfig(steps=steps, row_tokens=16, **training or {}),
            validation=ValidationConfig(
                num_prompts=held_out, **{"samples_per_prompt": 2, "interval": 2} if held_out else {}
            ),
            checkpoint=CheckpointConfig(interval=checkpoint_interval, keep=keep),
            generation=generation or GenerationConfig(),
        )
        self.trainer = trainer or FakeTrainer()
        self.replica = replica or FakeReplica(refuse)
        self.records = KeptMetrics()
        self.run_dir = RunDirectory(folder / "run")
        self.progress_file = (folder / "progress.txt").open("w")
        self.progress = Progress(steps, self.progress_file)
        self.controller = Controller(
            config,
            group_runners={config.tasks[0].name: Rollouter(CountDown, rubric or task.rubric(), max_context=16)},
            router=GeneratorRouter([self.replica]),
            trainer=self.trainer,
            stop_token_ids=[],
            published=PublishedWeights(),
            run_dir=self.run_dir,
            sinks=self.records,
            progress=self.progress,
            journal=RunJournal(self.run_dir.journal, start.position),
            start=start,
        )

    async def run(self) -> Any:
        return await asyncio.wait_for(self.controller.run(), HANG_S)

    def record(self, step: int) -> dict[str, float]:
        """Return the metrics of a trained step."""
        (metrics,) = [metrics for at, metrics in self.records if at == step and "time/step_s" in metrics]
        return metrics

    def steps_with(self, name: str) -> list[int]:
        return [step for step, metrics in self.records if name in metrics]


async def test_run_validates_trains_in_data_order_and_saves(tmp_path):
    rig = Rig(tmp_path)
    summary = await rig.run()
    groups = [sorted({sample.group_id for sample in samples}) for samples in rig.trainer.trained]
    assert groups == [["train-0", "train-1"], ["train-2", "train-3"], ["train-4", "train-5"], ["train-6", "train-7"]]
    assert rig.replica.pulled == [0, 1, 2, 3, 4]
    assert rig.steps_with("validation/reward_mean") == [0, 2, 4]
    assert rig.steps_with("train/loss") == [1, 2, 3, 4]
    assert rig.trainer.saved == [3, 4]
    assert rig.trainer.exported == [rig.run_dir.export]
    assert (summary.steps, summary.reward_before) == (4, summary.reward_after)


async def test_step_metrics_include_engine_gauges(tmp_path):
    class Engine(ScriptedEngine):
        asked = 0

        def add(self, request: EngineRequest) -> None:
            Engine.asked += len(request.prompt_token_ids)
            super().add(request)

    loop = EngineLoop(lambda: Engine(script=lambda context: context[-1] - 1))
    await loop.start()
    rig = Rig(tmp_path, steps=3, held_out=0, replica=LocalReplica("engine", loop, lambda version: []))
    await rig.run()
    await loop.close()
    steps = [metrics for _, metrics in rig.records if "train/loss" in metrics]
    assert len(steps) == 3
    assert sum(metrics["engine/prefix_cache_queries"] for metrics in steps) == Engine.asked > 0
    for metrics in steps:
        assert 0 <= metrics["engine/running_requests_mean"] <= metrics["engine/running_requests_max"] <= 6
        assert metrics["engine/waiting_requests_max"] == 0


async def test_run_without_validation_reports_that_it_is_off(tmp_path):
    rig = Rig(tmp_path, held_out=0)
    summary = await rig.run()
    assert rig.steps_with("train/loss") == [1, 2, 3, 4]
    assert rig.steps_with("validation/reward_mean") == []
    assert set(rig.replica.asked_for_experts) == {"train"}
    assert (summary.reward_before, summary.reward_after) == (None, None)
    show_summary(summary, rig.progress_file)
    rig.progress_file.flush()
    shown = (tmp_path / "progress.txt").read_text()
    assert shown.count("validation is off: validation.num_prompts = 0") == 1
    assert "off (validation.num_prompts = 0)" in shown


async def test_only_training_requests_routed_experts(tmp_path):
    rig = Rig(tmp_path, generation=GenerationConfig(return_routed_experts=True))
    await rig.run()
    assert rig.replica.asked_for_experts == {"train": True, "validation": False}
    samples = [sample for batch in rig.trainer.trained for sample in batch]
    for sample in samples:
        assert [row is not None for row in sample.routed_experts] == list(sample.loss_mask)


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_no_token_is_staler_than_the_bound(tmp_path, staleness):
    rig = Rig(tmp_path, steps=6, staleness=staleness)
    await rig.run()
    for version, samples in enumerate(rig.trainer.trained):
        versions = {v for sample in samples for v in sample.versions if v >= 0}
        assert versions <= set(range(version - staleness, version + 1))
    if staleness == 0:
        assert all(metrics.get("train/staleness_mean", 0) == 0 for _, metrics in rig.records)


async def test_training_overlaps_the_pull_of_the_previous_version(tmp_path):
    rig = Rig(tmp_path, staleness=1)
    pull, published = rig.replica.pull, list[int]()

    async def slow(version: int) -> None:
        if version == 1:
            await rig.trainer.until(2)
        published.append(rig.trainer.published)
        await pull(version)

    rig.replica.pull = slow
    await rig.run()
    assert published == rig.replica.pulled == [0, 1, 2, 3, 4], (
        "a version is published once all replicas have the previous one"
    )


async def test_on_policy_step_waits_for_the_pull_of_the_previous_version(tmp_path):
    rig = Rig(tmp_path, staleness=0)
    pull = rig.replica.pull

    async def slow(version: int) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        assert rig.trainer.version == version
        await pull(version)

    rig.replica.pull = slow
    await rig.run()
    assert rig.replica.pulled == [0, 1, 2, 3, 4]


async def test_training_continues_while_a_checkpoint_is_written(tmp_path):
    rig = Rig(tmp_path, steps=6, checkpoint_interval=1)
    finish = rig.trainer.finish_save

    async def slow() -> None:
        if rig.trainer.saving == 1:
            await rig.trainer.until(2)
        await finish()

    rig.trainer.finish_save = slow
    await rig.run()
    assert rig.trainer.saved == [1, 2, 3, 4, 5, 6]


class Poisoned(FakeTrainer):
    """Trainer that skips every step that contains one of the given groups."""

    def __init__(self, *groups: str) -> None:
        super().__init__()
        self._groups = groups

    async def step(self, samples: Sequence[Any]) -> StepResult:
        result = await super().step(samples)
        ids = tuple(dict.fromkeys(sample.rollout_id for sample in samples))
        if not (at_fault := tuple(each for each in ids if each.partition("/")[0] in self._groups)):
            return result
        part = SkippedMinibatch("loss nan", ids, at_fault)
        return replace(result, metrics={"staleness_mean": 0.0}, skipped=(part,))


async def test_untrainable_step_is_skipped_counted_and_its_rollouts_marked(tmp_path):
    rig = Rig(tmp_path, trainer=Poisoned("train-3"))
    summary = await rig.run()
    assert summary.steps == 4
    assert [rig.record(step)["train/skipped_steps"] for step in (1, 2, 3, 4)] == [0, 1, 1, 1]
    marked = [record for record in read_jsonl(rig.run_dir.rollouts) if record.get("dropped") == "skipped_step"]
    assert {record["group_id"] for record in marked} == {"train-2", "train-3"}
    assert len(marked) == 6
    assert {record["step"] for record in marked} == {2}
    of_group = {record["group_id"]: record["skipped"] for record in marked}
    assert of_group == {"train-2": "loss nan", "train-3": "loss nan; this rollout's loss is not finite"}
    rig.progress_file.flush()
    shown = (tmp_path / "progress.txt").read_text()
    assert "step 2 is skipped: loss nan; rollouts: train-3/0, train-3/1, train-3/2 (1 of training.max_skipped" in shown


@pytest.mark.parametrize("limit", [0, 1])
async def test_exceeding_max_skipped_steps_ends_the_run_after_its_batch(tmp_path, limit):
    rig = Rig(tmp_path, steps=6, trainer=Poisoned("train-0", "train-4"), training={"max_skipped_steps": limit})
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run()
    named = "train-4/0, train-4/1, train-4/2" if limit else "train-0/0, train-0/1, train-0/2"
    assert caught.group_contains(TrainingError, match=rf"training.max_skipped_steps = {limit}: .*{named}\. ")
    ended = 3 if limit else 1
    assert rig.trainer.saved[-1] == ended, "a resume begins with the next batch"
    assert rig.record(ended)["train/skipped_steps"] == limit + 1
    marked = [record for record in read_jsonl(rig.run_dir.rollouts) if record.get("dropped") == "skipped_step"]
    assert {record["step"] for record in marked} == ({1, 3} if limit else {1})


async def test_failing_reward_ends_the_run_without_a_checkpoint(tmp_path):
    def broken(rollout: object) -> float:
        raise KeyError("answer")

    rig = Rig(tmp_path, rubric=Rubric([Reward(broken)]))
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run()
    assert caught.group_contains(RewardError, match="broken")
    assert rig.trainer.saved == []


async def test_groups_with_failed_rewards_are_reported_counted_and_dropped(tmp_path):
    def judge(rollout: Rollout) -> float:
        if rollout.group_id in ("validation-0", "train-1"):
            raise KeyError("answer")
        return float(rollout.sibling)

    rig = Rig(tmp_path, rubric=Rubric([Reward(judge)]))
    await rig.run()
    trained = [sample.group_id for samples in rig.trainer.trained for sample in samples]
    assert list(dict.fromkeys(trained)) == [f"train-{i}" for i in (0, 2, 3, 4, 5, 6, 7, 8)]
    figures = [metrics for _, metrics in rig.records]
    assert sum(metrics.get("scheduling/dropped/reward_failed", 0) for metrics in figures) == 1
    assert [m["validation/unscored"] for m in figures if "validation/unscored" in m] == [2.0, 2.0, 2.0]
    shown = " ".join((tmp_path / "progress.txt").read_text().split())
    assert shown.count("KeyError: 'answer'") == 5  # when it first happened, with each validation, and at the end
    assert "reward 'judge' failed on rollout 'validation-0/0': KeyError: 'answer' (tests/run/test_c" in shown
    assert "4 groups were dropped for rewards that failed" in shown
    lines = [json.loads(line) for line in rig.run_dir.rollouts.read_text().splitlines()]
    lost = [line for line in lines if line["group_id"] == "train-1"]
    assert [line["status"] for line in lost] == ["completed"] * 3
    assert all("KeyError: 'answer'" in line["error"] and line["dropped"] == "reward_failed" for line in lost)


@pytest.mark.parametrize("method", ["train_sample", "validation_samples", "drop_reason"])
@pytest.mark.parametrize("error", [StopIteration, KeyError, asyncio.CancelledError])
async def test_raising_task_method_ends_the_run_and_names_its_line(tmp_path, method, error):
    class Broken(Counting):
        def drop_reason(self, group: RolloutGroup) -> None: ...

    def fails(self: object, *args: object) -> None:
        raise error("answer")

    setattr(Broken, method, fails)
    rig = Rig(tmp_path, task=Broken())
    with pytest.raises((DataError, ExceptionGroup)) as caught:
        await rig.run()
    errors = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else [caught.value]
    assert [type(one) for one in errors] == [DataError]
    expected = rf"{method}.*failed: {error.__name__}: .*answer.* \(tests/run/test_controller.py:\d+ in fails"
    assert re.search(expected, str(errors[0]))


async def test_groups_with_equal_rewards_train_with_zero_advantages(tmp_path):
    rig = Rig(tmp_path, rubric=Rubric([Reward(lambda rollout: 1.0, name="same")]))
    await rig.run()
    assert all(a == 0 for samples in rig.trainer.trained for sample in samples for a in sample.advantages)


async def test_failed_pull_on_every_replica_ends_the_run_with_a_checkpoint(tmp_path):
    rig = Rig(tmp_path, refuse=2)
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run()
    assert caught.group_contains(StateDictError)
    assert rig.trainer.saved == [2]  # trained, although no generator has it


async def test_cancelling_saves_the_trained_version(tmp_path):
    rig = Rig(tmp_path, staleness=0)
    run = asyncio.ensure_future(rig.controller.run())
    await asyncio.wait_for(rig.trainer.stepped.wait(), HANG_S)
    rig.replica.hold = asyncio.Event()  # the next step's rollouts never end
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(run, HANG_S)
    assert rig.trainer.saved == [rig.trainer.version]


async def test_second_cancel_ends_a_slow_last_save(tmp_path):
    rig = Rig(tmp_path, staleness=0)
    begun = asyncio.Event()

    async def slow() -> None:
        begun.set()
        await asyncio.Event().wait()

    rig.trainer.finish_save = slow
    run = asyncio.ensure_future(rig.controller.run())
    await asyncio.wait_for(rig.trainer.stepped.wait(), HANG_S)
    rig.replica.hold = asyncio.Event()
    run.cancel()
    await asyncio.wait_for(begun.wait(), HANG_S)
    assert not run.done()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(run, HANG_S)
    assert rig.trainer.saved == []
    shown = (tmp_path / "progress.txt").read_text().replace("\n", "")
    assert f"saving step {rig.trainer.version}" in shown


@pytest.mark.looptime
async def test_cancelled_run_finishes_an_hours_long_save(tmp_path):
    rig = Rig(tmp_path, staleness=0)
    finish = rig.trainer.finish_save

    async def slow() -> None:
        await asyncio.sleep(7200)
        await finish()

    rig.trainer.finish_save = slow
    run = asyncio.ensure_future(rig.controller.run())
    await rig.trainer.stepped.wait()
    rig.replica.hold = asyncio.Event()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert rig.trainer.saved == [rig.trainer.version]


@pytest.mark.parametrize("error", [NoSpaceError("no room"), OSError(5, "Input/output error"), RuntimeError()])
async def test_stop_reports_a_failed_last_save_and_stays_a_stop(tmp_path, error):
    rig = Rig(tmp_path, staleness=0)

    async def fails() -> None:
        raise error

    rig.trainer.finish_save = fails
    run = asyncio.ensure_future(rig.controller.run())
    await asyncio.wait_for(rig.trainer.stepped.wait(), HANG_S)
    rig.replica.hold = asyncio.Event()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(run, HANG_S)
    assert rig.controller.version == rig.trainer.version == 1
    shown = " ".join((tmp_path / "progress.txt").read_text().split())
    assert re.search(r"step 1 is not saved: (no space left|OSError: .*Input/output error|RuntimeError)", shown)


async def test_only_the_last_checkpoint_must_fit_on_the_disk(tmp_path):
    rig = Rig(tmp_path, steps=4, checkpoint_interval=1)
    finish = rig.trainer.finish_save

    async def full() -> None:
        raise NoSpaceError("no space left")

    async def full_for_two() -> None:
        await (full() if rig.trainer.saving in (1, 2) else finish())

    rig.trainer.finish_save = full_for_two
    await rig.run()
    assert rig.trainer.saved == [3, 4]

    rig = Rig(tmp_path / "last", checkpoint_interval=1)
    rig.trainer.finish_save = full
    with pytest.raises(NoSpaceError):
        await rig.run()
    assert rig.trainer.version == 4


async def test_failed_checkpoint_ends_the_run_with_its_reason(tmp_path):
    rig = Rig(tmp_path)
    rig.trainer.fail_to_save = True
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run()
    assert caught.group_contains(CheckpointError, match="no space left")


async def test_sample_older_than_the_bound_ends_the_run(tmp_path):
    rig = Rig(tmp_path)

    async def lag(version: int) -> None:  # a replica that claims to have pulled and serves old weights
        rig.replica.version = 0

    rig.replica.pull = lag
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run()
    assert caught.group_contains(TrainingError, match="max_staleness = 0")


async def test_version_mismatch_between_trainer_and_run_ends_the_run(tmp_path):
    rig = Rig(tmp_path / "step")
    rig.trainer.version = 1  # the run assumes version 0
    with pytest.raises(TrainingError, match="published version 1, but the run is at version 0"):
        await rig.run()

    rig = Rig(tmp_path / "twice")
    step = rig.trainer.step

    async def two_steps(samples: Sequence[Any]) -> StepResult:
        await step(samples)
        return await step(samples)

    rig.trainer.step = two_steps
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run()
    assert caught.group_contains(TrainingError, match="the step from version 0 gave version 2")

    rig = Rig(tmp_path / "save", checkpoint_interval=1)

    async def other(root: Path, run_state: dict[str, Any]) -> int:
        return run_state["step"] + 1

    rig.trainer.begin_save = other
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run()
    assert caught.group_contains(CheckpointError, match="saves version 2, but the journal is for version 1")
    assert rig.trainer.saved == []
