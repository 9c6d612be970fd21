"""Problems that a dry run finds by playing a group without a model."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from peft_files import matrices, write_adapter
from safetensors.torch import load_file, save_file
from user_project import project

from titan_rl.cli.main import main
from titan_rl.run.checks.own_processes import Machine

__all__ = ["project"]

TASK = """
import asyncio, random, threading, time
from titan_rl import Demonstration, MessageObservation, MessageStep, MessageTask
from titan_rl import Reward, RolloutStatus, Rubric, env_reward

gate = threading.Event()  # set after each test, to release blocked methods

class Env:
    def __init__(self, sample): self.sample = sample
    async def reset(self): return MessageObservation([{"role": "user", "content": f"Say {self.sample}."}])
    async def step(self, message):
        said = message["content"] == str(self.sample)
        return MessageStep(status=RolloutStatus.COMPLETED, rewards={"said": float(said)})
    async def close(self): ...

class Say(MessageTask):
    def sample(self, rng): return rng.randint(0, 999)
    def env(self, sample): return Env(sample)
    def rubric(self): return Rubric([env_reward("said")])

class Raises(Say):
    def env(self, sample):
        class Broken(Env):
            async def step(self, message): return {}["answer"]  # a mistake
        return Broken(sample)

class GivesText(Say):
    def rubric(self): return Rubric([Reward(text_reward)])

def text_reward(rollout): return "good"

def always(row, answer): return 1.0

class HintRaises(Say):
    def teacher_messages(self, rollout): raise ValueError("no hint")

class HintIsText(Say):
    def teacher_messages(self, rollout): return "a hint"

class HintIsEmpty(Say):
    def teacher_messages(self, rollout): return []

class HintIsLong(Say):
    def teacher_messages(self, rollout): return [{"role": "user", "content": "hint " * 512}]

async def awaits_forever(rollout):
    never = asyncio.Event()
    await never.wait()

class RewardHangs(Say):
    def rubric(self): return Rubric([Reward(awaits_forever, timeout_s=200)])

class HeldOutHasNoEnd(Say):
    def validation_samples(self, count):
        number = 0
        while True:
            assert number < 9  # else it fills the memory
            yield number
            number += 1

class RaisesRubric(Say):
    def rubric(self): raise ValueError("no words")

class NoRubric(Say):
    def rubric(self): return None

class NoRewards(Say):
    def rubric(self): return Rubric([])

class NothingHeldOut(Say):
    def validation_samples(self, count): return []

class Opens(Say):
    messages: list[dict[str, str]] = []
    def env(self, sample):
        class Opening(Env):
            async def reset(env): return MessageObservation(self.messages)
        return Opening(sample)

class NoSample(Say):
    def train_sample(self, seed, index): return [][index]

class Long(Say):
    def sample(self, rng): return f"{rng.random()} " * 99

class CannotOpen(Say):
    def open(self, run): raise TimeoutError("the task's server does not answer")

class Hangs(Say):
    def env(self, sample):
        class Waits(Env):
            async def reset(self): await asyncio.Event().wait()
        return Waits(sample)

class Blocks(Say):
    def env(self, sample):
        class Blocking(Env):
            async def reset(self): gate.wait()  # the event loop, too
        return Blocking(sample)

class Plain(Say):
    def env(self, sample):
        class PlainEnv(Env):
            def reset(self): return MessageObservation([{"role": "user", "content": "Say 7."}])
            def step(self, message): return MessageStep(status=RolloutStatus.COMPLETED, rewards={"said": 1})
            def close(self): ...
        return PlainEnv(sample)

class PlainBlocks(Say):
    def env(self, sample):
        class PlainEnv(Env):
            def reset(self): gate.wait()  # its own thread alone
        return PlainEnv(sample)

class GivesNumber(Say):
    def env(self, sample):
        class Number(Env):
            async def step(self, message): return 0.5
        return Number(sample)

class BlocksSample(Say):
    def train_sample(self, seed, index): gate.wait()

class Shows(Say):
    answer: str = "7"
    def demonstrations(self, count):
        said = {"role": "assistant", "content": self.answer}
        yield Demonstration([{"role": "user", "content": "Say 7."}, said])

loops = []

class ShowsAfterTheLoop(Shows):
    def train_sample(self, seed, index):
        loops.append(asyncio.get_running_loop())
        return super().train_sample(seed, index)
    def demonstrations(self, count):
        loops[0].call_soon_threadsafe(gate.set)
        assert gate.wait(10.0), "the event loop is blocked"
        return super().demonstrations(count)

class NotARenderer:
    def __init__(self, tokenizer): ...

def no_renderer(tokenizer): ...

def endless(tokenizer):
    from titan_rl.rollout.renderer import ChatTemplateRenderer
    renderer = ChatTemplateRenderer(tokenizer)
    renderer.get_stop_token_ids = lambda: []
    return renderer

class DrawsElsewhere(Say):
    def sample(self, rng): return random.randint(0, 10**9)

class HoldsOutElsewhere(Say):
    def validation_samples(self, count): return [random.randint(0, 10**9) for _ in range(count)]

class Question:
    def __init__(self, number): self.number = number

class DrawsObjects(Say):
    def key(self, sample): return str(sample.number)
    def sample(self, rng): return Question(rng.randint(0, 999))

class Filters(Say):
    def drop_reason(self, group): return group.absent

def broken_loss(tokens, clip): raise ValueError("no loss")

def broken_advantage(rewards): raise ValueError("no advantage")
"""

ADAPTERS = """
[model]
path = "policy"
[training]
adapter.rank = 2
[[tasks]]
name = "say"
type = "say_task:Say"
[[tasks]]
name = "shows"
type = "say_task:Shows"
[[adapters]]
name = "first"
tasks = ["say"]
[[adapters]]
name = "second"
tasks = ["say", "shows"]
training = { TRAINING }
"""


@pytest.fixture
def dry_run(project: Path, capsys: pytest.CaptureFixture[str]):
    (project / "say_task.py").write_text(textwrap.dedent(TASK))

    def run(task: str, *more: str) -> tuple[int, str]:
        """Return the exit code and standard error."""
        Path("say.toml").write_text(f'[model]\npath = "policy"\n[task]\ntype = "say_task:{task}"\n')
        code = main(["train", "say.toml", "--dry-run", *more])
        streams = capsys.readouterr()
        assert "[model]" in streams.out or code == 2
        return code, streams.err

    yield run
    task = sys.modules.pop("say_task", None)
    if task is not None:
        task.gate.set()


def test_dry_run_shows_the_first_prompt_and_its_rollouts(dry_run):
    code, output = dry_run("Say")
    assert code == 0
    assert "say: the first prompt has " in output
    assert "of 512 tokens:\n  | <|im_start|>user\n  | Say " in output
    assert "say: 4 rollouts of a mock policy: 3 completed, 1 truncated_length; rewards: 0 0 0 0\n" in output


def test_dry_run_warns_of_more_than_the_machine_has(dry_run, monkeypatch: pytest.MonkeyPatch):
    machine = Machine((), 2, 24 * 2**30)
    monkeypatch.setattr(Machine, "here", lambda: machine)
    code, output = dry_run("Say")
    assert code == 0
    assert "titan-rl: trainer: 1 rank without a GPU, because this machine has none\n" in output
    assert "titan-rl: ready: " in output
    code, output = dry_run("Say", "--training.data_parallel", "64")
    assert code == 0
    assert "titan-rl: warning: 64 trainer ranks" in output
    assert "but the run may not start: see the warnings above\n" in output
    assert "ready: " not in output
    code, output = dry_run("Say", "--generation.kv_cache_gib", "1e9")
    assert code == 1
    assert "error: generation.kv_cache_gib = 1e+09 is more than the memory of this machine, 24.0 GiB" in output
    assert output.endswith("titan-rl: not ready: a run would fail; see the errors above\n")


@pytest.mark.parametrize("is_same", [True, False])
def test_teacher_folder_tokenizer_is_compared_with_the_policy(dry_run, is_same: bool):
    shutil.copytree("policy", "teacher")
    if not is_same:
        other = json.loads(Path("teacher/tokenizer.json").read_text())
        vocabulary = other["model"]["vocab"]
        first, second = list(vocabulary)[60:62]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        Path("teacher/tokenizer.json").write_text(json.dumps(other))

    code, output = dry_run("Say", "--training.algorithm", "distillation", "--training.teacher", "teacher")

    assert code == (0 if is_same else 2)
    assert ("teacher has another tokenizer than the policy" in output) != is_same


def spoil(folder: Path, value: float) -> str:
    """Change the last number in a folder's weights, and return the name of its tensor."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name].flatten()[-1] = value
    save_file(tensors, file, {"format": "pt"})
    return name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_reported_with_file_and_tensor(dry_run, value: float):
    assert dry_run("Say")[0] == 0
    name = spoil(Path("policy"), value)
    code, output = dry_run("Say")
    assert code == 2
    assert f"policy/model.safetensors has NaN or infinite values in '{name}'; fetch the file again" in output


def test_teacher_weights_that_are_not_finite_are_reported(dry_run):
    shutil.copytree("policy", "teacher")
    name = spoil(Path("teacher"), math.nan)
    code, output = dry_run("Say", "--training.algorithm", "distillation", "--training.teacher", "teacher")
    assert code == 2
    assert f"teacher/model.safetensors has NaN or infinite values in '{name}'" in output


def test_adapter_weights_that_are_not_finite_are_reported(dry_run):
    rank = {"training.adapter.rank": "2", "training.adapter.alpha": "32", "training.adapter.start": "adapter"}
    shapes = matrices(2, Path("policy"))
    write_adapter(Path("adapter"), shapes, base_model_name_or_path="policy")
    options = [word for key, value in rank.items() for word in (f"--{key}", value)]
    assert dry_run("Say", *options)[0] == 0
    name = spoil(Path("adapter"), math.nan)
    code, output = dry_run("Say", *options)
    assert code == 2
    assert f"adapter/adapter_model.safetensors has NaN or infinite values in '{name}'" in output


@pytest.mark.parametrize(
    ("options", "is_old"),
    [
        ((), False),
        (("--sft.tiny_model.level", "word"), False),
        (("--sft.tiny_model.level", "byte"), True),
        (("--sft.tiny_model.parameters", "500000"), True),
        (("--sft.tiny_model.level", "byte", "--sft.start", "policy"), False),
    ],
)
def test_base_made_with_other_settings_of_the_tiny_model_is_reported(dry_run, options: tuple[str, ...], is_old: bool):
    note = {"settings": {"tiny_model": {"level": "word", "parameters": 900000}}}
    Path("policy", "sft.json").write_text(json.dumps(note))
    code, output = dry_run("Say", *options)
    assert code == 0
    assert ("policy' was made with sft.tiny_model." in output) == is_old
    assert ("run titan-rl sft again" in output) == is_old


def test_adapter_of_another_base_model_is_reported(dry_run):
    shutil.copytree("policy", "other")
    spoil(Path("other"), 0.125)
    write_adapter(Path("adapter"), matrices(2, Path("policy")), base_model_name_or_path="other")
    options = ("--training.adapter.rank", "2", "--training.adapter.start", "adapter")
    code, output = dry_run("Say", *options)
    assert code == 0
    assert "warning: training.adapter.start = " in output
    assert "was trained on other, whose weights are not those of model.path" in output
    assert "see the warnings above" in output


class Tokenizing(BaseHTTPRequestHandler):
    """Tokenizer endpoint that makes one token of any text."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"tokens": [1]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_teacher_server_tokenizer_is_checked_if_it_runs(dry_run):
    with HTTPServer(("127.0.0.1", 0), Tokenizing) as server:
        teacher = f"http://127.0.0.1:{server.server_port}"
        answering = threading.Thread(target=server.serve_forever)
        answering.start()
        code, output = dry_run("Say", "--training.algorithm", "distillation", "--training.teacher", teacher)
        server.shutdown()
        answering.join()
    assert code == 2
    assert f"the teacher {teacher} has another tokenizer than the policy" in output

    code, output = dry_run("Say", "--training.algorithm", "distillation", "--training.teacher", teacher)
    assert code == 0
    assert f"not checked, and a run would not start: the teacher {teacher} cannot be reached" in output


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("HintRaises", "rollout 'hint_raises-0/0' of task 'hint_raises' failed: ValueError: no hint (say_task"),
        ("HintIsText", "it returned 'a hint'; it must return a list of at least one message with a role (say_task"),
        ("HintIsEmpty", "it returned []; it must return a list of at least one message with a role"),
        ("HintIsLong", "model.max_context = 512 leaves no room for the policy's tokens, so none would be scored"),
    ],
)
def test_self_distillation_checks_the_teacher_messages(dry_run, task: str, expected: str):
    code, output = dry_run(task, "--training.algorithm", "distillation", "--training.teacher", "self")
    assert code == 1
    assert expected in output


@pytest.fixture
def dry_run_of_adapters(dry_run, capsys: pytest.CaptureFixture[str]):
    def run(training: str) -> tuple[int, str]:
        """Return the exit code and standard error.

        Args:
            training: Training table of the second adapter.
        """
        Path("say.toml").write_text(ADAPTERS.replace("TRAINING", training))
        code = main(["train", "say.toml", "--dry-run"])
        return code, capsys.readouterr().err

    return run


def test_task_shared_by_adapters_is_played_once(dry_run_of_adapters):
    code, output = dry_run_of_adapters('advantage = "group_mean"')
    assert code == 0
    assert (output.count("say: the first prompt"), output.count("shows: the first prompt")) == (1, 1)


def test_loss_and_advantage_of_one_adapter_are_checked(dry_run_of_adapters):
    code, output = dry_run_of_adapters('loss = "say_task:broken_loss"')
    assert code == 1
    assert "error: adapters.second: training.loss = 'say_task:broken_loss' on four tokens of two sequences" in output
    code, output = dry_run_of_adapters('advantage = "say_task:broken_advantage"')
    assert code == 1
    assert "no advantage" in output


def test_custom_loss_is_called_once(dry_run):
    code, output = dry_run("Say", "--training.loss", "say_task:broken_loss")
    assert code == 1
    assert (
        "error: training.loss = 'say_task:broken_loss' on four tokens of two sequences: ValueError: no loss" in output
    )


def test_mock_policy_answers_with_the_demonstration(dry_run, monkeypatch: pytest.MonkeyPatch):
    code, output = dry_run("Shows", "--task.held_out", "0")
    assert code == 0
    assert "rewards: " in output
    code, output = dry_run("Shows", "--task.answer", '"' + "7" * 100 + '"')
    assert code == 1
    assert re.search(
        r"error: a demonstration's answer has \d+ tokens, and sampling.max_tokens = 64 cuts it off", output
    )


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("Raises", "error: a rollout ends with error_env: KeyError: 'answer' (say_task.py:24 in step)"),
        ("GivesText", "error: a reward failed: "),
        ("Long", "error: a rollout ends with truncated_prompt: the prompt of turn 0 has "),
        (
            "NoSample",
            "train_sample(0, 0) of task 'no_sample' failed: IndexError: list index out of range (say_task.py:",
        ),
        ("RaisesRubric", "titan-rl: rubric() of task 'raises_rubric' failed: ValueError: no words (say_task.py:"),
        (
            "NoRubric",
            "titan-rl: rubric() of task 'no_rubric' failed: TypeError: it returned None; it must return a "
            "titan_rl.Rubric (say_task.py:",
        ),
        (
            "NoRewards",
            "titan-rl: rubric() of task 'no_rewards' failed: ValueError: the rubric has no rewards; give it at",
        ),
        ("Filters", "drop_reason of group 'filters-0' of the task failed: AttributeError"),
    ],
)
def test_dry_run_reports_task_errors_with_the_users_line(dry_run, task: str, expected: str):
    code, output = dry_run(task)
    assert code == 1
    assert expected in output
    assert "text_reward" in output or task != "GivesText"


@pytest.mark.parametrize(
    ("task", "call"), [("DrawsElsewhere", "train_sample(0, 0)"), ("HoldsOutElsewhere", "validation_samples(4)")]
)
def test_samples_drawn_with_other_randomness_are_reported(dry_run, task: str, call: str):
    code, output = dry_run(task)
    assert code == 1
    assert f"error: {call} returned different samples in two calls: " in output
    assert "rng" in output


def test_samples_without_a_repr_are_accepted(dry_run):
    assert dry_run("DrawsObjects")[0] == 0


def test_rows_with_long_prompts_are_counted(dry_run, capsys: pytest.CaptureFixture[str]):
    lines = [json.dumps({"prompt": "word " * (500 if n == 3 else 1)}) for n in range(6)]
    Path("rows.jsonl").write_text("\n".join(lines))
    task = 'type = "titan_rl.tasks:Rows"\npath = "rows.jsonl"\nreward = "say_task:always"\nheld_out = 0'
    Path("rows.toml").write_text(f'[model]\npath = "policy"\n[task]\n{task}\n')
    assert main(["train", "rows.toml", "--dry-run"]) == 0
    found = "rows: 1 of 6 prompts to train on, such as row 3 of "
    room = "leave no room for an answer in model.max_context = 512 tokens"
    output = capsys.readouterr().err
    assert found in output
    assert f"{room}, and are left out" in output
    assert main(["train", "rows.toml", "--dry-run", "--task.long_prompts", "error"]) == 2
    assert f'{room}; raise that, or set long_prompts = "leave_out" in the table' in capsys.readouterr().err


def test_timeout_error_of_a_task_is_not_the_dry_run_limit(dry_run):
    with pytest.raises(TimeoutError, match="the task's server does not answer"):
        dry_run("CannotOpen")


def test_hanging_environment_is_reported_with_its_line(dry_run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_rl.run.dry_run.ROLLOUT_LIMIT_S", 0.5)
    began = time.monotonic()
    code, output = dry_run("Hangs")
    assert code == 1
    assert "error: a rollout ends with error_timeout" in output
    assert line_of("await asyncio.Event().wait()") in output
    assert time.monotonic() - began < 30


def test_hanging_reward_is_named(dry_run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_rl.run.dry_run.ROLLOUT_LIMIT_S", 0.5)
    code, output = dry_run("RewardHangs")
    assert code == 1
    assert "reward 'awaits_forever' took longer than 0.5 s" in output
    assert re.search(r"say_task.py:\d+ in awaits_forever", output)


def test_endless_held_out_samples_are_read_only_as_needed(dry_run):
    assert dry_run("HeldOutHasNoEnd")[0] == 0


def test_blocking_sync_method_blocks_only_its_thread(dry_run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_rl.run.dry_run.ROLLOUT_LIMIT_S", 0.5)
    code, output = dry_run("PlainBlocks")
    assert code == 1
    assert "error: a rollout ends with error_timeout" in output
    assert line_of("its own thread alone") in output


@pytest.mark.parametrize(("task", "line"), [("Blocks", "the event loop, too"), ("BlocksSample", "index): gate")])
def test_method_that_blocks_the_event_loop_is_named(dry_run, monkeypatch: pytest.MonkeyPatch, task: str, line: str):
    monkeypatch.setattr("titan_rl.run.dry_run.LIMIT_S", 2.0)
    monkeypatch.setattr("titan_rl.run.dry_run.GRACE_S", 0.0)
    code, output = dry_run(task)
    assert code == 1
    assert "a group of each task took longer than 2 s without a model" in output
    assert line_of(line) in output
    assert "blocks, and does not return" in output


def test_slow_demonstration_does_not_block_the_event_loop(dry_run):
    code, output = dry_run("ShowsAfterTheLoop")
    assert code == 0, output


def test_sync_environment_methods_work(dry_run):
    code, output = dry_run("Plain")
    assert code == 0
    assert "rewards: 1 1 1 0" in output or "rewards: 1 1 1 1" in output


def test_wrong_return_type_is_reported_with_its_line(dry_run):
    code, output = dry_run("GivesNumber")
    assert code == 1
    line = line_of("return 0.5").partition(" in ")[0]
    assert f"TypeError: step of {line} returned a float; a MessageStep is expected" in output


def line_of(text: str) -> str:
    """Return the location of the only line that contains `text`, as errors show it."""
    lines = textwrap.dedent(TASK).splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if text in line)
    method = re.search(r"def (\w+)", lines[number - 1])
    assert method is not None
    return f"say_task.py:{number} in {method[1]}"


def test_validation_requires_held_out_samples(dry_run):
    code, output = dry_run("NothingHeldOut")
    assert code == 1
    assert "titan-rl: validation_samples(1) of task 'nothing_held_out' failed: ValueError: it returned no" in output
    assert dry_run("NothingHeldOut", "--validation.num_prompts", "0")[0] == 0


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ('[{role = "usr", content = "Hi"}]', "message 0 of the first prompt is not shown to the model: .* role 'usr'"),
        ('[{role = "user", content = "Hi"}, {role = "", content = "Go"}]', "message 1 of the .* not shown .* role ''"),
        ('[{role = "user", content = "Hi"}, {role = "user"}]', "message 1 of the first prompt has no content: "),
        ('[{role = "user", content = ""}]', "the first prompt has no text"),
        ('[{role = "system", content = "Be"}, {role = "user", content = "Hi"}]', ""),
    ],
)
def test_message_dropped_by_the_chat_template_is_reported(dry_run, messages: str, expected: str):
    code, output = dry_run("Opens", "--task.messages", messages, "--task.held_out", "0")
    assert code == (1 if expected else 0)
    assert re.search(f"opens: error: {expected}", output) if expected else "error" not in output


@pytest.mark.parametrize("run_dir", ["say_task.py", "say_task.py/deep", "/proc/nowhere/runs"])
def test_unusable_run_dir_is_reported_and_nothing_is_created(dry_run, run_dir: str):
    before = sorted(Path().iterdir())
    code, output = dry_run("Say", "--run_dir", run_dir)
    assert code == 2
    assert f"titan-rl: run_dir = {run_dir!r}: no run can be created there: " in output
    assert dry_run("Say", "--run_dir", "deep/runs")[0] == 0
    assert {path.name for path in Path().iterdir()} - {path.name for path in before} <= {"say.toml", "__pycache__"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NotARenderer", "has no bridge_to_next_turn, get_stop_token_ids, parse_response, render_ids"),
        ("no_renderer", "it returned None, which has no "),
        ("endless", "its get_stop_token_ids() returned no token that ends a completion"),
    ],
)
def test_invalid_renderer_is_reported_in_one_line(dry_run, name: str, expected: str):
    code, output = dry_run("Say", "--model.renderer", f"say_task:{name}")
    assert code == 2
    line = next(line for line in output.splitlines() if line.startswith("titan-rl: model.renderer = "))
    assert f"'say_task:{name}'" in line
    assert expected in line


def test_dry_run_plays_every_task(dry_run, project: Path, capsys: pytest.CaptureFixture[str]):
    dry_run("Say")
    Path("two.toml").write_text(
        '[model]\npath = "policy"\n[[tasks]]\ntype = "say_task:Say"\n[[tasks]]\ntype = "say_task:Raises"\n'
    )
    assert main(["train", "two.toml", "--dry-run"]) == 1
    output = capsys.readouterr().err
    assert "say: 4 rollouts" in output
    assert "raises: error: a rollout ends with error_env" in output
