"""Resuming a run whose models, data or code have changed since it began."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from peft_files import BASE, matrices, write_adapter
from user_project import project, write_tensors

from titan_rl.cli.main import main
from titan_rl.config import run_inputs
from titan_rl.config.build import open_rollouters
from titan_rl.config.load import load_config
from titan_rl.core.console import LOG
from titan_rl.core.errors import CheckpointError, ModelError
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.state import RunState
from titan_rl.run.resumption import Resumption, begin_run, resume_from_newest
from titan_rl.run.status import status_kept
from titan_rl.training.state.checkpoint import step_directory, write_checksums, write_summed
from titan_rl.viewer.runs import RunReader

__all__ = ["project"]

CONFIG = """
[model]
path = "policy"

[task]
type = "titan_rl.tasks:Rows"
path = "sums.jsonl"
held_out = 0.0
reward = "my_rewards:is_right"

[training]
steps = 5
"""

JUDGED = """
from titan_rl import Rubric
from titan_rl.tasks import Rows
from titan_rl.tasks.reward_model import LocalClassifier, RewardModel

class Judged(Rows):
    def rubric(self):
        return Rubric([RewardModel(LocalClassifier("judge"), lambda rollout: "")])
"""

SEATS = '''
from titan_rl.core.settings import FilePath
from titan_rl.tasks.players import SeatedTask

class Debate(SeatedTask):
    """A debate."""
    seat_names = ("pro", "contra")
    notes: str = ""
    words: FilePath = "sums.jsonl"

    def train_sample(self, seed, index): return "a"
    def validation_samples(self, count): return ["a"] * count
    def game(self, sample): raise NotImplementedError
    def rubric(self): raise NotImplementedError
'''


@pytest.fixture
def rows(project: Path) -> Iterator[Path]:
    """A project with a file of 100 rows, and a reward in a module of its own."""
    write_rows(range(100))
    (project / "my_rewards.py").write_text("def is_right(row, answer):\n    return 1.0\n")
    (project / "debate.py").write_text(SEATS)
    (project / "config.toml").write_text(CONFIG)
    yield project
    for name in ("my_rewards", "debate"):
        sys.modules.pop(name, None)


def write_rows(numbers: Any, name: str = "sums.jsonl") -> None:
    Path(name).write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1}) + "\n" for n in numbers))


def begin(*overrides: tuple[str, str], step: int = 3) -> RunDirectory:
    """A run that was stopped after a checkpoint, or before the first one for step 0."""
    config = load_config("config.toml", overrides)
    run_dir = RunDirectory.create(config)
    state = begin_run(config, run_dir).state
    if step:
        folder = step_directory(run_dir.checkpoints, step)
        folder.mkdir()
        text = json.dumps(asdict(replace(state, step=step, next_index=12)))
        write_checksums(folder, {"run_state.json": write_summed(folder / "run_state.json", text)})
    return run_dir


def resume(run_dir: RunDirectory, *overrides: tuple[str, str]) -> Resumption:
    return resume_from_newest(load_config(run_dir.config, overrides), run_dir)


def about_inputs(start: Resumption) -> list[str]:
    return [loss for loss in start.losses if "jsonl has no lines" not in loss]


def test_unchanged_inputs_resume_without_a_word(rows: Path):
    assert about_inputs(resume(begin())) == []


@pytest.mark.parametrize(
    ("numbers", "change"),
    [
        (range(99, -1, -1), "its 100 lines are in another order"),
        (range(130), "30 lines were added after its 100"),
        ([*range(70), *range(500, 520)], "it has 90 lines, and had 100; at least the first 64 are the same"),
        (range(7, 107), "it has 100 lines, and had 100; the first one differs"),
    ],
)
def test_changed_data_is_refused_unless_a_setting_allows_it(rows: Path, numbers: Any, change: str):
    run_dir = begin()
    write_rows(numbers)
    with pytest.raises(CheckpointError) as refused:
        resume(run_dir)
    where = f"task.path = {str(rows / 'sums.jsonl')!r}: {change}"
    assert f"the run was trained on other data: {where}. Samples" in str(refused.value)
    assert "--checkpoint.allow_changed_data true" in str(refused.value)
    start = resume(run_dir, ("checkpoint.allow_changed_data", "true"))
    assert about_inputs(start) == [f"{where}; the run continues with the new content"]
    assert start.state.inputs["data"]["tasks.rows.path"]["lines"] == len(numbers)


def test_dry_run_of_a_resume_with_other_data_is_refused(rows: Path, capfd: pytest.CaptureFixture[str]):
    run_dir = begin()
    write_rows(range(101))
    assert main(["train", "--resume", str(run_dir.path), "--dry-run"]) == 1
    assert "task.path = " in capfd.readouterr().err


def test_moved_data_may_be_named_on_resume(rows: Path, capfd: pytest.CaptureFixture[str]):
    run_dir = begin()
    Path("sums.jsonl").rename("moved.jsonl")
    assert about_inputs(resume(run_dir, ("task.path", "moved.jsonl"))) == []
    assert main(["train", "--resume", str(run_dir.path), "--task.path", "moved.jsonl", "--dry-run"]) == 0
    write_rows(range(50), "moved.jsonl")
    with pytest.raises(CheckpointError, match="it has 50 lines, and had 100"):
        resume(run_dir, ("task.path", "moved.jsonl"))


def test_other_line_ends_are_the_same_data(rows: Path):
    run_dir = begin()
    Path("sums.jsonl").write_bytes(Path("sums.jsonl").read_bytes().replace(b"\n", b"\r\n"))
    assert about_inputs(resume(run_dir)) == []


def test_changed_binary_data_and_folders_of_data_are_refused(rows: Path):
    (rows / "images").mkdir()
    for path, name in (("images/1.bin", "images"), ("rows.bin", "rows.bin")):
        (rows / path).write_bytes(b"\0" * 100)
        run_dir = of_seats(("task.words", name))
        (rows / path).write_bytes(b"\0" * 101)
        with pytest.raises(CheckpointError, match=f"task.words = '.*{name}': its content changed"):
            resume(run_dir)


def of_seats(*overrides: tuple[str, str], step: int = 3) -> RunDirectory:
    (Path("config.toml")).write_text('[model]\npath = "policy"\n[task]\ntype = "debate:Debate"\n[training]\nsteps = 5')
    return begin(*overrides, step=step)


def test_changed_samples_of_agents_are_refused(rows: Path):
    agents = 'type = "titan_rl.tasks.agents:AgentTask"\ntrain_file = "sums.jsonl"\ncommand = ["true"]'
    (rows / "config.toml").write_text(f'[model]\npath = "policy"\n[task]\n{agents}\n')
    run_dir = begin(("validation.num_prompts", "0"))
    write_rows(range(101))
    with pytest.raises(CheckpointError, match=r"task.train_file = '.*sums.jsonl': 1 lines were added after its 100"):
        resume(run_dir)


def test_changed_file_that_may_be_an_output_is_reported(rows: Path):
    Path("notes.txt").write_text("1\n")
    run_dir = of_seats(("task.notes", "notes.txt"))
    Path("notes.txt").write_text("1\n2\n")
    (change,) = about_inputs(resume(run_dir))
    assert change == "task.notes = 'notes.txt': 1 lines were added after its 1; the run continues with the new content"


def test_changed_code_is_reported_on_the_screen_and_on_the_page(rows: Path):
    run_dir = begin()
    (rows / "my_rewards.py").write_text("def is_right(row, answer):\n    return 0.0\n")
    importlib.reload(sys.modules["my_rewards"])
    start = resume(run_dir)
    (change,) = about_inputs(start)
    assert change == f"{rows / 'my_rewards.py'} changed since the run began; it continues with the new code"
    assert start.changes == (change,)
    with status_kept(run_dir.path, begins=False, changes=start.changes):
        pass
    assert change in RunReader(run_dir.path).summary()["warnings"]


def test_other_version_of_the_library_is_reported(rows: Path, monkeypatch: pytest.MonkeyPatch):
    first = {"version": "0.1.0", "commit": "0123456789abcdef", "digest": "a"}
    monkeypatch.setattr(run_inputs, "library_identity", lambda: first)
    run_dir = begin()
    monkeypatch.setattr(run_inputs, "library_identity", lambda: {**first, "version": "0.2.0", "commit": ""})
    assert about_inputs(resume(run_dir)) == []  # the same code
    monkeypatch.setattr(run_inputs, "library_identity", lambda: {"version": "0.2.0", "commit": "", "digest": "b"})
    (change,) = about_inputs(resume(run_dir))
    assert change == "the run was saved by titan_rl 0.1.0 (commit 0123456789ab), and continues with 0.2.0"


def make_model(name: str) -> None:
    shutil.copytree("policy", name)


def exchange(name: str) -> None:
    write_tensors(Path(name) / "model.safetensors", "model.embed_tokens.weight", "another.weight")


def test_replaced_seat_is_refused_and_a_moved_one_accepted(rows: Path):
    make_model("opponent")
    run_dir = of_seats(("task.seats.contra", '{ policy = "opponent" }'))
    shutil.move("opponent", "moved")
    assert about_inputs(resume(run_dir, ("task.seats.contra.policy", "moved"))) == []
    exchange("moved")
    with pytest.raises(CheckpointError, match=r"seats.contra.policy = '.*moved' is not the model that the run began"):
        resume(run_dir, ("task.seats.contra.policy", "moved"))


TEACHER = [("training.algorithm", "distillation"), ("training.teacher", "teacher")]


def test_replaced_teacher_is_refused_unless_another_is_named(rows: Path):
    make_model("teacher")
    run_dir = begin(*TEACHER)
    exchange("teacher")
    with pytest.raises(CheckpointError, match=r"training.teacher = '.*teacher' is not the model .*: weights changed"):
        resume(run_dir)
    shutil.move("teacher", "stronger")
    (note,) = about_inputs(resume(run_dir, ("training.teacher", "stronger")))
    assert note.startswith("training.teacher = ")
    assert note.endswith("stronger' is another model than before: weights changed")


def test_teacher_that_is_a_run_is_refused_once_it_has_a_newer_checkpoint(rows: Path):
    teacher = begin(step=1)
    run_dir = begin(TEACHER[0], ("training.teacher", str(teacher.path)))
    assert about_inputs(resume(run_dir)) == []
    shutil.copytree(step_directory(teacher.checkpoints, 1), newer := step_directory(teacher.checkpoints, 2))
    write_checksums(newer, {"run_state.json": write_summed(newer / "run_state.json", "{}")})
    with pytest.raises(CheckpointError, match=r"training.teacher = .* weights changed"):
        resume(run_dir)


@pytest.fixture
def adapter(rows: Path) -> Path:
    """Adapter from which runs of the example's model start."""
    (rows / "config.toml").write_text(CONFIG.replace('"policy"', f'"{BASE}"') + "[training.adapter]\nrank = 2\n")
    return write_adapter(rows / "adapter")


def replace_adapter(folder: Path) -> None:
    shapes = matrices()
    shutil.rmtree(folder)
    write_adapter(folder, dict(reversed(shapes.items())))
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")


def test_replaced_initial_adapter_is_refused_before_the_first_checkpoint(adapter: Path):
    run_dir = begin(("training.adapter.start", "adapter"), step=0)
    replace_adapter(adapter)
    with pytest.raises(CheckpointError, match=r"training.adapter.start = '.*adapter' is not the initial adapter of"):
        resume(run_dir)


def test_replaced_initial_adapter_is_reported_if_a_checkpoint_replaces_it(adapter: Path):
    start = ("training.adapter.start", "adapter")
    run_dir, with_kl = begin(start), begin(start, ("training.kl_coef", "0.1"))
    replace_adapter(adapter)
    (note,) = about_inputs(resume(run_dir))
    assert "has other weights than the run began with; those of" in note
    with pytest.raises(CheckpointError, match=r"weights changed, and training.kl_coef = 0.1 holds the policy to them"):
        resume(with_kl)


def test_teacher_at_another_address_is_reported(rows: Path):
    run_dir = begin(TEACHER[0], ("training.teacher", "http://127.0.0.1:8000#large"))
    assert about_inputs(resume(run_dir)) == []
    (note,) = about_inputs(resume(run_dir, ("training.teacher", "http://127.0.0.1:8000#small")))
    assert note.endswith("#small' is another teacher than 'http://127.0.0.1:8000#large', with which the run began")


async def test_replaced_reward_model_is_refused_when_the_tasks_are_opened_again(rows: Path):
    make_model("judge")
    (rows / "config.toml").write_text(CONFIG.replace("titan_rl.tasks:Rows", "judged:Judged"))
    (rows / "judged.py").write_text(JUDGED)
    run_dir = begin()
    config = load_config(run_dir.config)
    for _ in range(2):
        async with open_rollouters(config, run_dir.path, LOG):
            pass
    exchange("judge")
    with pytest.raises(ModelError, match="judge is not the model that the run began with: weights changed"):
        async with open_rollouters(config, run_dir.path, LOG):
            pytest.fail("opened")
    async with open_rollouters(config, rows / "elsewhere", LOG):  # no run
        pass
    sys.modules.pop("judged", None)


def test_inputs_of_the_start_are_in_the_state_of_the_run(rows: Path):
    inputs = RunState.read(begin().path).inputs
    assert inputs["data"]["tasks.rows.path"]["lines"] == 100
    assert "my_rewards" in inputs["code"]
    assert inputs["models"]["model.path"].keys() >= {"weights", "tokenizer"}
    assert inputs["titan_rl"]["digest"]
