"""What a dry run finds by playing a group without a model."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from user_project import project

from titan_rl.cli.main import main

__all__ = ["project"]

TASK = """
import asyncio, threading, time
from titan_rl import Demonstration, MessageObservation, MessageStep, MessageTask
from titan_rl import Reward, RolloutStatus, Rubric, env_reward

gate = threading.Event()  # what blocks goes on when its test is over

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

class ShowsSlowly(Shows):
    def demonstrations(self, count):
        gate.wait(1.0)
        return super().demonstrations(count)

class NotARenderer:
    def __init__(self, tokenizer): ...

def no_renderer(tokenizer): ...

def endless(tokenizer):
    from titan_rl.rollout.renderer import ChatTemplateRenderer
    renderer = ChatTemplateRenderer(tokenizer)
    renderer.get_stop_token_ids = lambda: []
    return renderer

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
        """Exit code, and what is on standard error."""
        Path("say.toml").write_text(f'[model]\npath = "policy"\n[task]\ntype = "say_task:{task}"\n')
        code = main(["train", "say.toml", "--dry-run", *more])
        streams = capsys.readouterr()
        assert "[model]" in streams.out or code == 2
        return code, streams.err

    yield run
    task = sys.modules.pop("say_task", None)
    if task is not None:
        task.gate.set()


def test_the_first_prompt_is_shown_with_what_becomes_of_it(dry_run):
    code, told = dry_run("Say")
    assert code == 0
    assert "say: the first prompt has " in told
    assert "of 512 tokens:\n  | <|im_start|>user\n  | Say " in told
    assert "say: 4 rollouts of a mock policy: 3 completed, 1 truncated_length; rewards: 0 0 0 0\n" in told


@pytest.mark.parametrize("is_same", [True, False])
def test_the_tokenizer_of_a_teachers_folder_is_compared_with_the_policys(dry_run, is_same: bool):
    shutil.copytree("policy", "teacher")
    if not is_same:
        other = json.loads(Path("teacher/tokenizer.json").read_text())
        vocabulary = other["model"]["vocab"]
        first, second = list(vocabulary)[60:62]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        Path("teacher/tokenizer.json").write_text(json.dumps(other))

    code, told = dry_run("Say", "--training.algorithm", "distillation", "--training.teacher", "teacher")

    assert code == (0 if is_same else 2)
    assert ("teacher has another tokenizer than the policy" in told) != is_same


class Tokenizing(BaseHTTPRequestHandler):
    """Makes one token of any text."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"tokens": [1]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_the_server_of_a_teacher_is_asked_for_its_tokens_if_it_runs(dry_run):
    with HTTPServer(("127.0.0.1", 0), Tokenizing) as server:
        teacher = f"http://127.0.0.1:{server.server_port}"
        answering = threading.Thread(target=server.serve_forever)
        answering.start()
        code, told = dry_run("Say", "--training.algorithm", "distillation", "--training.teacher", teacher)
        server.shutdown()
        answering.join()
    assert code == 2
    assert f"the teacher {teacher} has another tokenizer than the policy" in told

    code, told = dry_run("Say", "--training.algorithm", "distillation", "--training.teacher", teacher)
    assert code == 0
    assert f"not checked, and a run would not start: the teacher {teacher} cannot be reached" in told


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("HintRaises", "rollout 'hint_raises-0/0' of task 'hint_raises' failed: ValueError: no hint (say_task"),
        ("HintIsText", "it returned 'a hint'; it must return a list of at least one message with a role (say_task"),
        ("HintIsEmpty", "it returned []; it must return a list of at least one message with a role"),
        ("HintIsLong", "model.max_context = 512 leaves no room for the policy's own, so that none has a score"),
    ],
)
def test_a_policy_that_teaches_itself_is_given_its_first_messages(dry_run, task: str, says: str):
    code, told = dry_run(task, "--training.algorithm", "distillation", "--training.teacher", "self")
    assert code == 1
    assert says in told


@pytest.fixture
def dry_run_of_adapters(dry_run, capsys: pytest.CaptureFixture[str]):
    def run(training: str) -> tuple[int, str]:
        """Exit code, and what is on standard error.

        Args:
            training: of the second adapter.
        """
        Path("say.toml").write_text(ADAPTERS.replace("TRAINING", training))
        code = main(["train", "say.toml", "--dry-run"])
        return code, capsys.readouterr().err

    return run


def test_a_task_that_adapters_share_is_played_once(dry_run_of_adapters):
    code, told = dry_run_of_adapters('advantage = "group_mean"')
    assert code == 0
    assert (told.count("say: the first prompt"), told.count("shows: the first prompt")) == (1, 1)


def test_a_loss_and_an_advantage_of_one_adapter_are_called_too(dry_run_of_adapters):
    code, told = dry_run_of_adapters('loss = "say_task:broken_loss"')
    assert code == 1
    assert "error: adapters.second: training.loss = 'say_task:broken_loss' on four tokens of two sequences" in told
    code, told = dry_run_of_adapters('advantage = "say_task:broken_advantage"')
    assert code == 1
    assert "no advantage" in told


def test_a_loss_of_ones_own_is_called_once(dry_run):
    code, told = dry_run("Say", "--training.loss", "say_task:broken_loss")
    assert code == 1
    assert "error: training.loss = 'say_task:broken_loss' on four tokens of two sequences: ValueError: no loss" in told


def test_the_policy_says_what_a_demonstration_says(dry_run, monkeypatch: pytest.MonkeyPatch):
    code, told = dry_run("Shows", "--task.held_out", "0")
    assert code == 0
    assert "rewards: " in told
    code, told = dry_run("Shows", "--task.answer", '"' + "7" * 100 + '"')
    assert code == 1
    assert re.search(r"error: a demonstration's answer has \d+ tokens, and sampling.max_tokens = 64 cuts it off", told)


@pytest.mark.parametrize(
    ("task", "says"),
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
            "titan-rl: rubric() of task 'no_rubric' failed: TypeError: it gave None; it must give a titan_rl.Rubric "
            "(say_task.py:",
        ),
        (
            "NoRewards",
            "titan-rl: rubric() of task 'no_rewards' failed: ValueError: the rubric has no rewards; give it at",
        ),
        ("Filters", "drop_reason of group 'filters-0' of the task failed: AttributeError"),
    ],
)
def test_what_would_fail_a_run_is_told_with_the_users_line_in_a_second(dry_run, task: str, says: str):
    code, told = dry_run(task)
    assert code == 1
    assert says in told
    assert "text_reward" in told or task != "GivesText"


def test_a_time_limit_of_a_tasks_own_is_not_taken_for_that_of_the_dry_run(dry_run):
    with pytest.raises(TimeoutError, match="the task's server does not answer"):
        dry_run("CannotOpen")


def test_an_environment_that_hangs_is_left_to_itself(dry_run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_rl.run.dry_run.ROLLOUT_LIMIT_S", 0.5)
    began = time.monotonic()
    code, told = dry_run("Hangs")
    assert code == 1
    assert "error: a rollout ends with error_timeout" in told
    assert line_of("await asyncio.Event().wait()") in told
    assert time.monotonic() - began < 30


def test_a_reward_that_never_returns_is_named(dry_run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_rl.run.dry_run.ROLLOUT_LIMIT_S", 0.5)
    code, told = dry_run("RewardHangs")
    assert code == 1
    assert "reward 'awaits_forever' took longer than 0.5 s" in told
    assert re.search(r"say_task.py:\d+ in awaits_forever", told)


def test_held_out_samples_without_an_end_are_taken_as_far_as_they_are_needed(dry_run):
    assert dry_run("HeldOutHasNoEnd")[0] == 0


def test_a_plain_method_that_blocks_holds_up_its_own_thread_alone(dry_run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_rl.run.dry_run.ROLLOUT_LIMIT_S", 0.5)
    code, told = dry_run("PlainBlocks")
    assert code == 1
    assert "error: a rollout ends with error_timeout" in told
    assert line_of("its own thread alone") in told


@pytest.mark.parametrize(("task", "line"), [("Blocks", "the event loop, too"), ("BlocksSample", "index): gate")])
def test_what_blocks_the_event_loop_for_good_is_named(dry_run, monkeypatch: pytest.MonkeyPatch, task: str, line: str):
    monkeypatch.setattr("titan_rl.run.dry_run.LIMIT_S", 2.0)
    monkeypatch.setattr("titan_rl.run.dry_run.GRACE_S", 0.0)
    code, told = dry_run(task)
    assert code == 1
    assert "a group of each task took longer than 2 s without a model" in told
    assert f"{line_of(line)}" in told
    assert "blocks, and does not return" in told


def test_a_slow_demonstration_leaves_the_event_loop_alone(dry_run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_rl.run.dry_run.BLOCKED_AFTER_S", 0.2)
    code, told = dry_run("ShowsSlowly")
    assert code == 0
    assert "stood still" not in told


def test_plain_methods_work(dry_run):
    code, told = dry_run("Plain")
    assert code == 0
    assert "rewards: 1 1 1 0" in told or "rewards: 1 1 1 1" in told


def test_what_a_method_gives_that_it_should_not_is_told_with_its_line(dry_run):
    code, told = dry_run("GivesNumber")
    assert code == 1
    line = line_of("return 0.5").partition(" in ")[0]
    assert f"TypeError: step of {line} gave a float; a MessageStep is expected" in told


def line_of(text: str) -> str:
    """The place of the line that has it."""
    lines = textwrap.dedent(TASK).splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if text in line)
    method = re.search(r"def (\w+)", lines[number - 1])
    assert method is not None
    return f"say_task.py:{number} in {method[1]}"


def test_held_out_samples_are_there_where_they_are_wanted(dry_run):
    code, told = dry_run("NothingHeldOut")
    assert code == 1
    assert "titan-rl: validation_samples(1) of task 'nothing_held_out' failed: ValueError: it returned no" in told
    assert dry_run("NothingHeldOut", "--validation.num_prompts", "0")[0] == 0


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ('[{role = "usr", content = "Hi"}]', "message 0 of the first prompt is not shown to the model: .* role 'usr'"),
        ('[{role = "user", content = "Hi"}, {role = "", content = "Go"}]', "message 1 of the .* not shown .* role ''"),
        ('[{role = "user", content = "Hi"}, {role = "user"}]', "message 1 of the first prompt has no content: "),
        ('[{role = "user", content = ""}]', "the first prompt has no text"),
        ('[{role = "system", content = "Be"}, {role = "user", content = "Hi"}]', ""),
    ],
)
def test_a_message_that_the_model_does_not_see_is_told(dry_run, messages: str, says: str):
    code, told = dry_run("Opens", "--task.messages", messages, "--task.held_out", "0")
    assert code == (1 if says else 0)
    assert re.search(f"opens: error: {says}", told) if says else "error" not in told


@pytest.mark.parametrize("run_dir", ["say_task.py", "say_task.py/deep", "/proc/nowhere/runs"])
def test_a_folder_that_no_run_can_be_made_in_is_told(dry_run, run_dir: str):
    before = sorted(Path().iterdir())
    code, told = dry_run("Say", "--run_dir", run_dir)
    assert code == 2
    assert f"titan-rl: run_dir = {run_dir!r}: no run can be created there: " in told
    assert dry_run("Say", "--run_dir", "deep/runs")[0] == 0
    assert {path.name for path in Path().iterdir()} - {path.name for path in before} <= {"say.toml", "__pycache__"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NotARenderer", "has no bridge_to_next_turn, get_stop_token_ids, parse_response, render_ids"),
        ("no_renderer", "it returned None, which has no "),
        ("endless", "its get_stop_token_ids() returned no token that ends a completion"),
    ],
)
def test_what_is_no_renderer_is_told_in_a_line(dry_run, name: str, says: str):
    code, told = dry_run("Say", "--model.renderer", f"say_task:{name}")
    assert code == 2
    line = next(line for line in told.splitlines() if line.startswith("titan-rl: model.renderer = "))
    assert f"'say_task:{name}'" in line
    assert says in line


def test_several_tasks_are_played_each(dry_run, project: Path, capsys: pytest.CaptureFixture[str]):
    dry_run("Say")
    Path("two.toml").write_text(
        '[model]\npath = "policy"\n[[tasks]]\ntype = "say_task:Say"\n[[tasks]]\ntype = "say_task:Raises"\n'
    )
    assert main(["train", "two.toml", "--dry-run"]) == 1
    told = capsys.readouterr().err
    assert "say: 4 rollouts" in told
    assert "raises: error: a rollout ends with error_env" in told
