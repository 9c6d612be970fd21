"""`titan_rl.train` and `titan_rl.evaluate` in this process, without heavy dependencies."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from background import HANG_S
from rollout.test_message_token_env import LetterRenderer
from run.test_controller import Counting, FakeReplica, FakeTrainer
from test_readme_examples import count_down

import titan_rl
from titan_rl import (
    Completion,
    ConfigError,
    EngineLoop,
    FinishReason,
    RoundRobin,
    ScriptedEngine,
    StrayCancellationError,
    VersionSpan,
)
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import CheckpointConfig, SamplingConfig, ValidationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.errors import TrainingError
from titan_rl.core.run_files import read_status
from titan_rl.rollout.chat_env import ChatReply
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.directory import RunDirectory
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer_protocol import StepResult


def config(folder: Path, **tables: Any) -> RunConfig:
    return RunConfig(
        **{
            "run_dir": str(folder),
            "model": ModelConfig(path="none", max_context=16),
            "tasks": (TaskSource(task=Counting()),),
            "training": TrainingConfig(steps=2, row_tokens=32),
            "rollout": RolloutConfig(group_size=2),
            "sampling": SamplingConfig(max_tokens=4),
            "scheduling": SchedulingConfig(groups_per_step=2, max_staleness=0),
            "validation": ValidationConfig(num_prompts=2, samples_per_prompt=2),
            "checkpoint": CheckpointConfig(interval_s=0),
            **tables,
        }
    )


class RecordingSink:
    """Sink that records its calls."""

    def __init__(self) -> None:
        self.logged: list[int] = []
        self.closed = 0

    def log(self, step: int, metrics: Any) -> None:
        self.logged.append(step)

    def close(self) -> None:
        self.closed += 1


def parts() -> dict[str, Any]:
    return {"trainer": FakeTrainer(), "generate": count_down, "renderer": LetterRenderer()}


def test_train_in_process_returns_the_summary(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sink, trainer = RecordingSink(), FakeTrainer()
    before = logging.getLogger().handlers[:]
    summary = titan_rl.train(
        config(tmp_path),
        trainer=trainer,
        generate=count_down,
        renderer=LetterRenderer(),
        strategy=RoundRobin(),
        sinks={"mine": sink},
        overrides={"training.steps": 3},
    )
    assert (summary.steps, len(trainer.trained)) == (3, 3)
    assert summary.reward_before == summary.reward_after
    assert len(summary.rewards) == 3
    assert summary.run_dir.parent == tmp_path
    assert (summary.run_dir / "report.html").is_file()
    assert set(sink.logged) == {0, 1, 2, 3}
    assert sink.closed == 1
    assert logging.getLogger().handlers == before
    printed = capfd.readouterr()
    assert printed.out == "", "messages of the run do not mix with the output of the program that trains"
    assert "step 3/3" in printed.err
    assert "generator" not in printed.err
    assert f"report             {summary.run_dir / 'report.html'}" in printed.err


def test_train_reaches_the_trainer_step_in_at_most_ten_calls(tmp_path: Path) -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "call_path.py"))
    paths: list[list[str]] = []

    class Measuring(FakeTrainer):
        async def step(self, samples: Any) -> StepResult:
            paths.append(script["calls_to_here"]())
            return await super().step(samples)

    with script["tasks_noted"]():
        titan_rl.train(config(tmp_path), **{**parts(), "trainer": Measuring()})
    assert len(paths) == 2
    assert len(paths[0]) <= 10, paths[0]


def test_task_and_filters_arguments_replace_the_settings(tmp_path: Path) -> None:
    class Fives(Counting):
        def train_sample(self, seed: int, index: int) -> int:
            return 5

    dropped: list[str] = []

    def first(group: Any) -> str | None:
        dropped.append(group.group_id)
        return "is_first" if len(dropped) == 1 else None

    given = parts()
    summary = titan_rl.train(config(tmp_path), task=Fives(), filters=[first], **given)
    assert summary.rewards[-1] == pytest.approx(5.5)
    assert len(dropped) >= 5
    assert sum(len({sample.group_id for sample in step}) for step in given["trainer"].trained) == 4


async def test_train_and_evaluate_block_inside_a_running_event_loop(tmp_path: Path) -> None:
    summary = titan_rl.train(config(tmp_path), **parts())
    assert summary.steps == 2
    evaluation = titan_rl.evaluate(config(tmp_path), count_down, renderer=LetterRenderer())
    assert evaluation.reward is not None


def test_custom_replica_pulls_trained_weights(tmp_path: Path) -> None:
    replica = FakeReplica()
    replica.pause = replica.resume = replica.abort = replica.close = nothing  # pyright: ignore
    titan_rl.train(config(tmp_path), trainer=FakeTrainer(), replicas=[replica], renderer=LetterRenderer())  # pyright: ignore
    assert replica.pulled == [0, 1, 2]


async def nothing(*args: Any) -> None: ...


class OwnTrainer(FakeTrainer):
    """Custom trainer that has only what the protocol requires: no metrics, and its own checkpoint files."""

    def __init__(self, stop_after: int = 99) -> None:
        super().__init__()
        self.begun_from: Path | None = None
        self._stop_after = stop_after

    async def step(self, samples: Any) -> StepResult:
        if self.version == self._stop_after:
            raise RuntimeError("the machine is wanted for something else")
        return StepResult((await super().step(samples)).version, {})

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        state = root / f"step-{self.version}" / "optimizer" / "state.txt"
        state.parent.mkdir(parents=True)
        state.write_text("mine")
        return await super().begin_save(root, run_state)

    async def load(self, checkpoint: Path) -> int:
        self.begun_from = checkpoint
        self.version = int(checkpoint.name.removeprefix("step-"))
        return self.version


def test_stray_cancellation_fails_the_run(tmp_path: Path) -> None:
    class Gone(Counting):
        @asynccontextmanager
        async def open(self, run: Any) -> AsyncIterator[None]:
            raise asyncio.CancelledError  # as a closed client raises
            yield

    with pytest.raises(StrayCancellationError, match="the run was cancelled, although nobody requested it"):
        titan_rl.train(config(tmp_path), task=Gone(), **parts())
    assert read_status(tmp_path / "latest").state == "failed"


def test_run_stopped_after_its_last_save_is_finished(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Interrupted(FakeTrainer):
        async def export(self, path: Path) -> None:
            path.mkdir()  # noqa: ASYNC240
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(HANG_S)

    with pytest.raises(KeyboardInterrupt):
        titan_rl.train(config(tmp_path), **{**parts(), "trainer": Interrupted()})
    assert "the run is finished" in capfd.readouterr().err
    assert read_status(tmp_path / "latest").state == "finished"


def test_custom_trainer_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    long = config(tmp_path, training=TrainingConfig(steps=4, row_tokens=32))
    given = {"generate": count_down, "renderer": LetterRenderer()}
    with pytest.raises(RuntimeError, match="wanted for something else"):
        titan_rl.train(long, trainer=OwnTrainer(stop_after=2), **given)
    stopped = (tmp_path / "latest").resolve()
    trainer = OwnTrainer()
    assert titan_rl.train(long, trainer=trainer, resume=stopped, **given).steps == 4
    assert trainer.begun_from == stopped / "checkpoints" / "step-2"
    assert len(trainer.trained) == 2


def test_damaged_checkpoint_of_a_custom_trainer_is_rejected(tmp_path: Path) -> None:
    given = {"generate": count_down, "renderer": LetterRenderer()}
    titan_rl.train(config(tmp_path), trainer=OwnTrainer(), **given)
    (tmp_path / "latest/checkpoints/step-2/optimizer/state.txt").write_text("none")
    with pytest.raises(titan_rl.TitanRLError, match=r"state\.txt is damaged"):
        titan_rl.train(
            config(tmp_path), trainer=OwnTrainer(), resume=tmp_path / "latest", overrides={"training.steps": 3}, **given
        )


def test_check_settings_runs_for_python_configs(tmp_path: Path) -> None:
    class Checked(Counting):
        def check_settings(self) -> None:
            raise ConfigError("task.seats has blakc")

    for given in (config(tmp_path / "runs", tasks=(TaskSource(task=Checked()),)), config(tmp_path / "runs")):
        with pytest.raises(ConfigError, match=r"task\.seats has blakc"):
            titan_rl.train(given, task=Checked() if given.tasks[0].task == Counting() else None, **parts())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss": lambda: None}, "has no name by which it can be imported"),
        ({"loss": "none_of_these"}, "training.loss = 'none_of_these' must be one of"),
        ({"overrides": {"training.stepz": 3}}, "nearest: training.steps"),
        ({"overrides": {"trainin.steps": 3}}, r"\[trainin\] is not a table; nearest: training"),
        ({"task": object()}, "must be a titan_rl.core.settings.Section"),
        ({"overrides": {"rollout.num_workers": 1}}, "set it to 0"),
        ({"trainer": None}, "model.path = 'none' is not a folder"),
        ({"trainer": 4}, "trainer = 4 is not a Trainer: it lacks begin_publish, begin_save, "),
        ({"generate": 3}, "generate = 3 must be an async function"),
        ({"replicas": [5], "generate": None}, "replicas.0. = 5 is not a Replica: it lacks abort, "),
        ({"replicas": [5]}, "give generate or replicas, not both"),
    ],
)
def test_train_rejects_invalid_arguments_before_creating_a_run(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        titan_rl.train(config(tmp_path / "runs"), **{**parts(), **changes})
    assert not (tmp_path / "runs").exists()


def test_overrides_apply_to_a_task_argument(tmp_path: Path) -> None:
    class From(Counting):
        start: int = 2

        def validation_samples(self, count: int) -> list[int]:
            return [self.start] * count

    given: dict[str, Any] = {"task": From(), "renderer": LetterRenderer()}
    few, many = (
        titan_rl.evaluate(config(tmp_path), count_down, overrides={"task.start": start}, **given) for start in (1, 5)
    )
    assert many.task.turns == few.task.turns + 4


def test_module_function_is_saved_by_name(tmp_path: Path) -> None:
    titan_rl.train(config(tmp_path), advantage=ones, **parts())
    written = (tmp_path / "latest" / "config.toml").read_text()
    assert f'advantage = "{__name__}:ones"' in written


def ones(rewards: Any) -> list[float]:
    return [1.0 for _ in rewards]


def test_evaluate_compares_generate_functions(tmp_path: Path) -> None:
    async def gives_up(prompt_token_ids: Any, *, request_id: str, session_id: Any = None, sampling: Any) -> Completion:
        answer = await count_down(prompt_token_ids, request_id=request_id, sampling=sampling)
        return Completion(request_id, [9], answer.logprobs, FinishReason.STOP, answer.version_spans)

    given: dict[str, Any] = {"renderer": LetterRenderer(), "num_prompts": 3, "samples": 2, "success": 4}
    good = titan_rl.evaluate(config(tmp_path), count_down, out=tmp_path / "good", **given)
    bad = titan_rl.evaluate(config(tmp_path), gives_up, **given)
    assert (good.reward, bad.reward) == (4.5, 1.5)
    assert good.task.pass_at[2].mean == 1.0
    assert (good.folder, bad.folder) == ((tmp_path / "good").absolute(), None)
    assert titan_rl.read_evaluation(tmp_path / "good") == good
    assert "-3.000 (3 same prompts, 1 distinct)" in titan_rl.table([good, bad])
    with pytest.raises(ConfigError, match="nums is no option; there are num_prompts"):
        titan_rl.evaluate(config(tmp_path), count_down, nums=3)


def test_evaluate_rejects_an_invalid_policy(tmp_path: Path) -> None:
    given: Any = 3
    with pytest.raises(ConfigError, match="policy = 3 must be the folder of a run"):
        titan_rl.evaluate(config(tmp_path), given)


@pytest.mark.parametrize("policy", [count_down, "http://localhost:1"])
def test_evaluate_rejects_the_folder_of_a_run_as_out_folder(tmp_path: Path, policy: Any) -> None:
    run = RunDirectory(tmp_path / "run")
    run.config.write_text("")
    before = sorted(run.path.rglob("*"))
    with pytest.raises(ConfigError, match=r"/run: this is the folder of a run; name another folder"):
        titan_rl.evaluate(config(tmp_path), policy, renderer=LetterRenderer(), out=run.path)
    assert sorted(run.path.rglob("*")) == before


def test_token_outside_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 4}')

    async def beyond(prompt_token_ids: Any, *, request_id: str, session_id: Any = None, sampling: Any) -> Completion:
        return Completion(request_id, [4], [0.0], FinishReason.STOP, [VersionSpan(0, 1)])

    given = {"renderer": LetterRenderer(), "overrides": {"model.path": str(tmp_path)}}
    expected = r"generate returned token 4; the model in .* has tokens below 4"
    with pytest.raises(titan_rl.TitanRLError, match=expected):
        titan_rl.evaluate(config(tmp_path), beyond, **given)
    with pytest.raises(titan_rl.TitanRLError, match=expected):
        titan_rl.train(config(tmp_path), trainer=FakeTrainer(), generate=beyond, **given)


def test_evaluation_repeats_the_validation_and_measures_of_a_run(tmp_path: Path) -> None:
    class Measured(Counting):
        def measure(self, groups: Any) -> dict[str, float]:
            return {"games": float(len(groups))}

    async def guesses(prompt_token_ids: Any, *, request_id: str, session_id: Any = None, sampling: Any) -> Completion:
        answer = await count_down(prompt_token_ids, request_id=request_id, sampling=sampling)
        token = answer.token_ids[0] if sampling.seed % 3 else 9
        return Completion(request_id, [token], answer.logprobs, FinishReason.STOP, answer.version_spans)

    given: dict[str, Any] = {"task": Measured(), "renderer": LetterRenderer()}
    summary = titan_rl.train(config(tmp_path), trainer=FakeTrainer(), generate=guesses, **given)
    evaluation = titan_rl.evaluate(config(tmp_path), guesses, **given)
    assert evaluation.reward == summary.reward_after != 4.5
    assert evaluation.task.measures == {"games": 2.0}
    assert "games" in titan_rl.table([evaluation])


async def test_evaluate_async_uses_an_engine_of_the_running_loop(tmp_path: Path) -> None:
    loop = EngineLoop(lambda: ScriptedEngine(max_context=16))
    await loop.start()
    try:
        evaluation = await titan_rl.evaluate_async(config(tmp_path), loop.generate, renderer=LetterRenderer())
    finally:
        await loop.close()
    assert evaluation.task.num_samples == 4


def test_chat_function_is_rejected_for_a_token_task(tmp_path: Path) -> None:
    async def chat(messages: Any, *, tools: Any = None, request_id: str, session_id: Any = None, sampling: Any) -> Any:
        return ChatReply({"role": "assistant", "content": "x"})

    with pytest.raises(titan_rl.GenerationError, match="uses tokens, but this policy answers with messages"):
        titan_rl.evaluate(config(tmp_path), chat)


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Set Python's SIGINT handler, since a shell may have SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_an_evaluation_and_keeps_finished_samples(tmp_path: Path, default_sigint: None) -> None:
    async def stops(prompt_token_ids: Any, *, request_id: str, session_id: Any = None, sampling: Any) -> Completion:
        if request_id.startswith("validation-1"):
            raise KeyboardInterrupt
        return await count_down(prompt_token_ids, request_id=request_id, sampling=sampling)

    with pytest.raises(KeyboardInterrupt):
        titan_rl.evaluate(config(tmp_path), stops, renderer=LetterRenderer(), out=tmp_path / "out", in_flight=1)
    stopped = titan_rl.read_evaluation(tmp_path / "out")
    assert not stopped.is_complete
    assert stopped.task.num_samples == 2


LIGHT = """
import sys
import titan_rl
assert "titan_rl.api" not in sys.modules
titan_rl.train, titan_rl.evaluate, titan_rl.table
heavy = {"torch", "monarch", "vllm", "torchtitan", "transformers"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_api_is_imported_lazily_and_without_heavy_modules() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


class DiskFillingTrainer(FakeTrainer):
    """Trainer whose second step fails. From then on the disk is full, for open and for new files of the run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.folder = folder
        self.monkeypatch = monkeypatch

    async def step(self, samples: Any) -> StepResult:
        if len(self.trained) == 1:
            self.fill_disk()
            raise TrainingError("the loss of step 2 is nan")
        return await super().step(samples)

    def fill_disk(self) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
                if path.is_relative_to(self.folder) and path.name != "lock":
                    os.dup2(full, descriptor)
        os.close(full)

        def refuse(*_: object, **__: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.monkeypatch.setattr(Path, "write_bytes", refuse)
        self.monkeypatch.setattr(Path, "write_text", refuse)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_at_the_end_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures to write the log, journal, report and status do not replace the error that ended the run."""
    given = parts() | {"trainer": DiskFillingTrainer(tmp_path, monkeypatch)}
    with pytest.raises(TrainingError, match="the loss of step 2 is nan"):
        titan_rl.train(config(tmp_path), **given)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink())
    status = read_status(folder)
    assert status.state == "failed"
    assert status.reason.startswith("the loss of step 2 is nan")
