"""Supervised run from its settings to the exported model, with a fake trainer that counts steps."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from titan_rl import Demonstration
from titan_rl.config.load import load_config, load_sft_config
from titan_rl.config.resume_changes import settings_of
from titan_rl.config.run import RunConfig
from titan_rl.core.console import LOG
from titan_rl.core.errors import ActorDiedError, CheckpointError, ConfigError, DataError, ModelError, TrainingError
from titan_rl.core.tracing import spans
from titan_rl.run.directory import RunDirectory, read_jsonl, run_name
from titan_rl.run.held_out import best_of
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.sinks import JSONLSink
from titan_rl.run.resumption import open_run_dir, resume_from_newest
from titan_rl.run.sft.loop import LearnedSteps, SupervisedLoop
from titan_rl.run.sft.train import check, find_demonstrations, plan_run
from titan_rl.run.trainer_recovery import RecoveringTrainer, recovering
from titan_rl.training.settings import MADE_BY_SFT
from titan_rl.training.state.checkpoint import list_checkpoints, step_directory, step_of, write_checksums, write_summed
from titan_rl.training.tiny_model import make_tiny_model
from titan_rl.training.trainer_protocol import SkippedMinibatch, StepResult
from titan_rl.viewer.trace import Traces
from titan_rl.weights.types import PublishedWeights

TASK = """
import random
from titan_rl import Demonstration, MessageTokenEnv, Rubric, env_reward
from titan_rl.core.settings import Section


class Sums(Section):
    largest: int = 9

    def train_sample(self, seed, index):
        numbers = random.Random(f"{seed}/{index}")
        return numbers.randint(0, self.largest), numbers.randint(0, self.largest)

    def validation_samples(self, count): ...
    def make_env(self, sample, renderer): ...
    def rubric(self): ...

    def demonstrations(self, count):
        for number in range(count):
            a, b = self.train_sample("demonstration", number)
            question = {"role": "user", "content": f"What is {a} + {b}? Give the number alone."}
            yield Demonstration([question, {"role": "assistant", "content": str(a + b)}])
"""
TOML = """
model.path = "base"
model.max_context = 64
sampling.max_tokens = 8
task.type = "supervised_sums:Sums"

[sft]
demonstrations = 100
batch_size = 10
interval = 4
tiny_model.parameters = 60_000
"""


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "supervised_sums.py").write_text(TASK)
    (tmp_path / "sums.toml").write_text(TOML)
    return tmp_path / "sums.toml"


class CountingTrainer:
    """Fake trainer whose loss is the reciprocal of its version."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.learned: list[list[int]] = []
        self.reached: dict[int, asyncio.Event] = {}
        self._saving: tuple[Path, dict[str, Any]] | None = None

    async def step(self, samples: Sequence[Any]) -> StepResult:
        self.learned.append([int(sample.group_id.partition("/")[2]) for sample in samples])
        self.version += 1
        if self.version in self.reached:
            self.reached[self.version].set()
            await asyncio.sleep(0)
        return StepResult(self.version, {"loss": 1 / self.version, "num_tokens": 3.0, "ratio_mean": 1.0})

    async def measure(self, samples: Sequence[Any]) -> float:
        return 2 / (1 + self.version)

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        self._saving = step_directory(root, self.version), run_state
        return self.version

    async def finish_save(self) -> None:
        assert self._saving is not None
        folder, state = self._saving
        folder.mkdir(parents=True, exist_ok=True)
        write_checksums(folder, {"run_state.json": write_summed(folder / "run_state.json", json.dumps(state))})

    async def export(self, path: Path) -> None:
        path.mkdir(exist_ok=True)  # noqa: ASYNC240
        (path / "model.safetensors").write_text(str(self.version))


class Mortal(CountingTrainer):
    """Trainer that dies in a step.

    Args:
        dies_in: Number of the step; 0 means never.
    """

    excused = False

    def __init__(self, dies_in: int = 0) -> None:
        super().__init__()
        self._dies_in = dies_in
        self._is_dead = asyncio.Event()

    async def step(self, samples: Sequence[Any]) -> StepResult:
        if self.version + 1 == self._dies_in:
            self.end("")
            raise ActorDiedError("trainer died")
        return await super().step(samples)

    async def load(self, checkpoint: Path) -> int:
        self.version = step_of(checkpoint)
        return self.version

    async def ended(self) -> str:
        await self._is_dead.wait()
        return "trainer died"

    def end(self, reason: str) -> None:
        self._is_dead.set()


class Group:
    """Trainer group that replaces a trainer that dies in a step."""

    def __init__(self, dies_in: int) -> None:
        self.trainers = [Mortal(dies_in)]
        self.before_leaving: Callable[[], Awaitable[object]]
        self.waits_for = ""

    @property
    def trainer(self) -> Any:
        return self.trainers[-1]

    async def restart(self) -> Any:
        self.trainers.append(Mortal())
        return self.trainer


def make_loop(
    config: RunConfig,
    folder: Path,
    trainer: CountingTrainer | Group,
    start: RunState | None = None,
    shown: io.StringIO | None = None,
) -> SupervisedLoop:
    found = find_demonstrations(config)
    plan = plan_run(config, found, folder)
    ready, tokens = plan.config, plan.tokens
    run_dir = RunDirectory(folder)
    run_dir.write_config(ready)
    run_state = start or RunState(settings=settings_of(ready), run="a run")
    if start is None:
        run_state.write(run_dir.path)
    progress = Progress(len(plan.steps), shown or io.StringIO())
    if isinstance(trainer, Group):
        steps, checkpoints = LearnedSteps(tokens, plan.steps), run_dir.checkpoints
        loop_trainer: Any = RecoveringTrainer(
            trainer,
            steps=steps,
            checkpoints=checkpoints,
            published=PublishedWeights(),
            max_respawns=1,
            progress=progress,
        )
    else:
        loop_trainer = trainer
    return SupervisedLoop(
        ready,
        loop_trainer,
        tokens,
        plan=plan.steps,
        held_out=plan.held_out,
        run_dir=run_dir,
        start=run_state,
        sinks=JSONLSink(run_dir),
        progress=progress,
    )


async def test_sft_trains_measures_held_out_loss_and_exports_the_model(
    toml: Path,
) -> None:
    trainer, folder = CountingTrainer(), toml.parent / "run"
    shown = io.StringIO()
    loop = make_loop(load_sft_config(toml), folder, trainer, shown=shown)
    summary = await loop.run()
    assert (summary.steps, summary.tokens) == (9, 27)
    learned = [number for step in trainer.learned for number in step]
    assert len(set(learned)) == len(learned) == 90
    records = read_jsonl(folder / "metrics.jsonl")
    measured = {record["step"]: record["validation/loss"] for record in records if "validation/loss" in record}
    assert list(measured) == [0, 4, 8, 9]
    reported = [line for line in shown.getvalue().splitlines() if line.startswith("held-out")]
    assert reported == [f"held-out loss {loss:.3f} after step {step}" for step, loss in measured.items()]
    assert (summary.loss_before, summary.loss_after) == (2.0, 0.2)
    assert [record["train/loss"] for record in records if "train/loss" in record] == [1 / step for step in range(1, 10)]
    assert not any("ratio" in name for record in records for name in record)
    assert summary.out == toml.parent / "base"
    assert (summary.out / "model.safetensors").read_text() == "9"
    assert json.loads((summary.out / "sft.json").read_text())["held_out_loss"] == {"before": 2.0, "after": 0.2}
    load_sft_config(toml)  # sft may replace its own output


async def test_checkpoint_with_the_lowest_held_out_loss_is_kept(toml: Path) -> None:
    class Overfitting(CountingTrainer):
        async def measure(self, samples: Sequence[Any]) -> float:
            return {0: 2.0, 4: 0.5, 8: 0.8, 9: 0.9}[self.version]

    options = [("checkpoint.keep", "best"), ("validation.interval", "4"), ("training.stop_at.reward", "-9")]
    config = load_sft_config(toml, options)
    loop = make_loop(config, toml.parent / "run", Overfitting())
    summary = await loop.run()
    assert summary.steps == 9, "training.stop_at is for held-out rewards"
    checkpoints = toml.parent / "run" / "checkpoints"
    assert [step_of(path) for path in list_checkpoints(checkpoints)] == [4, 9]
    assert best_of(checkpoints) == (step_directory(checkpoints, 4), -0.5)
    assert summary.rows["verdict"].startswith("It memorizes its demonstrations")


async def test_file_of_chats_needs_no_task(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    toml, folder = tmp_path / "chats.toml", tmp_path / "run"
    toml.write_text('[model]\npath = "base"\n[sft]\ndata = "chats.jsonl"\nheld_out = 0\nsteps = 2\n')
    config = load_sft_config(toml)
    assert run_name(config) == "chats"
    assert (await make_loop(config, folder, CountingTrainer()).run()).steps == 2
    again = load_sft_config(folder / "config.toml")
    assert (again.tasks, again.sft.data) == ((), str(tmp_path / "chats.jsonl"))
    for load, overrides in ((load_config, []), (load_sft_config, [("sft.data", "")])):
        with pytest.raises(ConfigError, match=r"the table \[task\] is missing"):
            load(toml, overrides)


def test_output_folder_is_the_target_of_a_link(toml: Path) -> None:
    base = toml.parent / "base"
    base.symlink_to("target")
    assert load_sft_config(toml).sft.out == str(toml.parent / "target"), "the target does not exist yet"
    (toml.parent / "target").mkdir()
    (toml.parent / "target" / MADE_BY_SFT).touch()
    assert load_sft_config(toml).sft.out == str(toml.parent / "target")


async def test_unlearnable_demonstrations_are_skipped_up_to_the_limit(toml: Path) -> None:
    class Poisoned(CountingTrainer):
        async def step(self, samples: Sequence[Any]) -> StepResult:
            result = await super().step(samples)
            if result.version not in (2, 3):
                return result
            part = SkippedMinibatch("loss nan", (samples[0].rollout_id,))
            return StepResult(result.version, {"num_tokens": 0.0}, (part,))

    folder, shown = toml.parent / "run", io.StringIO()
    await make_loop(load_sft_config(toml, [("sft.out", "other")]), folder, Poisoned(), shown=shown).run()
    records = [record for record in read_jsonl(folder / "metrics.jsonl") if "time/step_s" in record]
    assert [record["train/skipped_steps"] for record in records[:4]] == [0, 1, 2, 2]
    assert [record["step"] for record in records if "train/loss" not in record] == [2, 3]
    assert "step 2 is skipped: loss nan; rollouts: " in shown.getvalue()

    config = load_sft_config(toml, [("training.max_skipped_steps", "1")])
    with pytest.raises(ExceptionGroup) as caught:
        await make_loop(config, toml.parent / "limited", Poisoned()).run()
    assert caught.group_contains(TrainingError, match=r"2 steps were skipped, and training\.max_skipped_steps = 1")
    assert json.loads((toml.parent / "limited/checkpoints/step-000003/run_state.json").read_text())["step"] == 3


async def test_stopped_sft_run_resumes_with_the_next_demonstrations(toml: Path) -> None:
    whole = CountingTrainer()
    await make_loop(load_sft_config(toml), toml.parent / "whole", whole).run()
    first, folder = CountingTrainer(), toml.parent / "run"
    first.reached[4] = asyncio.Event()
    config = load_sft_config(toml, [("sft.out", "other")])
    running = asyncio.ensure_future(make_loop(config, folder, first).run())
    await first.reached[4].wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not (toml.parent / "other").exists()

    again = load_sft_config(folder / "config.toml")
    found = find_demonstrations(again)
    start = resume_from_newest(plan_run(again, found, folder).config, RunDirectory(folder))
    assert start.state.step == first.version
    second = CountingTrainer(start.state.step)
    summary = await make_loop(again, folder, second, start.state).run()
    assert first.learned + second.learned == whole.learned
    trained = [record["step"] for record in read_jsonl(folder / "metrics.jsonl") if "train/loss" in record]
    assert trained == list(range(1, 10))
    assert (summary.steps, summary.tokens, summary.loss_before) == (9, 27, 2.0)
    assert (toml.parent / "other" / "model.safetensors").read_text() == "9"


async def test_trace_matches_metrics_when_stopped_during_a_step(toml: Path) -> None:
    class Held(CountingTrainer):
        async def step(self, samples: Sequence[Any]) -> StepResult:
            if self.version == 3:
                begun.set()
                await release.wait()
            return await super().step(samples)

    begun, release, folder = asyncio.Event(), asyncio.Event(), toml.parent / "run"
    with spans.recording(folder / "trace", "controller", 1 << 20, LOG):
        running = asyncio.ensure_future(make_loop(load_sft_config(toml), folder, Held()).run())
        await begun.wait()
        running.cancel()
        await asyncio.sleep(0)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    steps = Traces(folder / "trace").read()["controller"].lanes["steps"]
    recorded = [record["step"] for record in read_jsonl(folder / "metrics.jsonl") if "train/loss" in record]
    assert [one.args["step"] for one in steps if one.name == "train step"] == recorded == [1, 2, 3, 4]
    assert [(one.name, one.args["step"]) for one in steps][-1] == ("checkpoint", 4)


async def test_respawned_trainer_repeats_steps_since_the_checkpoint(toml: Path) -> None:
    whole = CountingTrainer()
    config = load_sft_config(toml, [("checkpoint.interval", "3")])
    await make_loop(config, toml.parent / "whole", whole).run()
    group, shown, folder = Group(dies_in=6), io.StringIO(), toml.parent / "run"
    loop = make_loop(load_sft_config(toml, [("checkpoint.interval", "3")]), folder, group, shown=shown)
    async with recovering(loop._trainer):  # pyright: ignore
        await loop.run()
    first, second = group.trainers
    assert first.learned == whole.learned[:5]
    assert second.learned == whole.learned[3:]
    assert "2 steps were trained again" in shown.getvalue()
    records = [record for record in read_jsonl(folder / "metrics.jsonl") if "train/loss" in record]
    assert [record["step"] for record in records] == list(range(1, 10))
    assert [record["step"] for record in records if record.get("train/respawns") == 1] == [6]


def test_dry_run_reports_the_demonstrations_to_learn(toml: Path) -> None:
    ready, report = check(load_sft_config(toml), toml.parent / "scratch")
    assert report.startswith("90 demonstrations to learn in 9 steps, and 10 held out; the first step learns ")
    assert ready.sft.out == str(toml.parent / "base")
    short = load_sft_config(toml, [("model.max_context", "9"), ("sampling.max_tokens", "1")])
    with pytest.raises(DataError, match=r"more than model\.max_context = 9 tokens, such as demonstration \d+ of Sums"):
        check(short, toml.parent / "scratch")
    with pytest.raises(ConfigError, match=r"sft\.tiny_model\.parameters = 1,000 is too few"):
        check(load_sft_config(toml, [("sft.tiny_model.parameters", "1000")]), toml.parent / "scratch")


WORDS_TASK = """
import random
from titan_rl import Demonstration
from titan_rl.core.settings import Section


class Words(Section):
    answers: str = "reversed"

    def train_sample(self, seed, index): ...
    def validation_samples(self, count): ...
    def make_env(self, sample, renderer): ...
    def rubric(self): ...

    def demonstrations(self, count):
        for number in range(count):
            word = "".join(random.Random(number).choices("abcdefgh", k=6))
            answer = {"reversed": word[::-1], "sentence": f"It is {word[::-1]}.", "label": ("yes", "no")[number % 2]}
            question = {"role": "user", "content": f"Spell {word} backwards."}
            yield Demonstration([question, {"role": "assistant", "content": answer[self.answers]}])
"""


@pytest.mark.parametrize(
    ("answers", "level", "is_noted"),
    [("reversed", "word", True), ("reversed", "byte", False), ("sentence", "word", False), ("label", "word", False)],
)
def test_answers_of_one_word_token_are_reported(toml: Path, answers: str, level: str, is_noted: bool) -> None:
    (toml.parent / "words_task.py").write_text(WORDS_TASK)
    options = {"task.type": "words_task:Words", "task.answers": answers, "sft.tiny_model.level": level}
    report = check(load_sft_config(toml, list(options.items())), toml.parent / "scratch")[1]
    assert ("warning: 100 of 100 answers are a single token" in report) == is_noted
    assert ('set sft.tiny_model.level = "byte"' in report) == is_noted


def test_chats_without_an_answer_to_learn_are_left_out_and_counted(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
    learned, context = {"messages": [asked, said]}, {"messages": [asked, {**said, "weight": 0}]}
    file, toml = tmp_path / "chats.jsonl", tmp_path / "chats.toml"
    toml.write_text('[model]\npath = "base"\n[sft]\ndata = "chats.jsonl"\nheld_out = 0\nsteps = 2\n')
    file.write_text("".join(f"{json.dumps(row)}\n" for row in [learned, context, learned, context]))
    config = load_sft_config(toml)
    plan = plan_run(config, find_demonstrations(config), tmp_path / "run")
    assert plan.tokens.num_demonstrations == 2
    report = check(config, tmp_path / "scratch")[1]
    assert f"warning: 2 of 4 demonstrations, such as {file}:2, have only answers with" in report
    begun = {"messages": [asked, {**said, "prefix": True}, {**said, "weight": 0}]}
    file.write_text("".join(f"{json.dumps(row)}\n" for row in [begun, context]))
    with pytest.raises(DataError, match=r"chats.jsonl:1: all answers of all demonstrations have .weight.: 0"):
        check(config, tmp_path / "scratch")


def test_demonstration_without_an_answer_is_an_error_and_not_left_out(toml: Path) -> None:
    config = load_sft_config(toml)
    silent = ("number 3", Demonstration([{"role": "user", "content": "2 + 3?"}]))
    with pytest.raises(DataError, match="number 3: it has no assistant message"):
        plan_run(config, [silent], toml.parent / "scratch").tokens.samples([0])


def test_batch_tokens_limits_every_step(toml: Path) -> None:
    config = load_sft_config(toml, [("sft.batch_tokens", "100"), ("sft.batch_size", "32"), ("sft.shuffle", "false")])
    found = find_demonstrations(config)
    plan = plan_run(config, found, toml.parent / "scratch")
    assert plan.config.training.steps == len(plan.steps)
    assert all(sum(map(plan.tokens.length, step)) <= 100 for step in plan.steps)
    numbers = [number for step in plan.steps for number in step]
    assert numbers == sorted(numbers)


def test_sft_out_refuses_to_replace_a_foreign_model(toml: Path) -> None:
    (toml.parent / "base").mkdir()
    with pytest.raises(ConfigError, match="base exists, and was not created by titan-rl sft, so it is not replaced"):
        load_sft_config(toml)
    make_tiny_model(toml.parent / "start", texts=[], level="byte", parameters=60_000)
    with pytest.raises(ConfigError, match=r"To train that model, set sft\.start to it and sft\.out to another"):
        load_sft_config(toml, [("sft.start", "start"), ("sft.out", "start")])
    assert load_sft_config(toml, [("sft.start", "start"), ("sft.out", "other")]).sft.start == str(toml.parent / "start")


def test_missing_sft_inputs_are_named(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"command line: sft\.start = 'none' is not a folder here"):
        load_sft_config(toml, [("sft.start", "none")])
    with pytest.raises(ConfigError, match=r"command line: sft\.data = 'none\.jsonl' does not exist here"):
        load_sft_config(toml, [("sft.data", "none.jsonl")])
    with pytest.raises(ConfigError, match=r"sft\.data = '\.' is a folder without rollouts\.jsonl"):
        load_sft_config(toml, [("sft.data", ".")])
    (toml.parent / "start").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_sft_config(toml, [("sft.start", "start")])
    with pytest.raises(ConfigError, match=r"min_reward = 0\.5 selects rollouts of a run"):
        load_sft_config(toml, [("sft.min_reward", "0.5")])


def test_resume_requires_the_command_that_created_the_run(toml: Path) -> None:
    config = load_sft_config(toml)
    supervised = open_run_dir(config, None, supervised=True)
    supervised.supervised.touch()
    assert open_run_dir(config, supervised.path, supervised=True).path == supervised.path
    with pytest.raises(ConfigError, match="that is a run of titan-rl sft; resume it with titan-rl sft"):
        open_run_dir(config, supervised.path)
    other = open_run_dir(config, None)
    with pytest.raises(ConfigError, match="that is a run of titan-rl train; resume it with titan-rl train"):
        open_run_dir(config, other.path, supervised=True)


def test_resume_rejects_other_demonstrations(toml: Path) -> None:
    from titan_rl.run.sft.train import (
        _check_data,  # pyright: ignore[reportPrivateUsage]
        digest,
    )

    config = load_sft_config(toml)
    file = toml.parent / "supervised.json"
    _check_data(file, digest(find_demonstrations(config)))
    _check_data(file, digest(find_demonstrations(config)))
    fewer = load_sft_config(toml, [("sft.demonstrations", "99")])
    with pytest.raises(CheckpointError, match="was trained on other demonstrations"):
        _check_data(file, digest(find_demonstrations(fewer)))
