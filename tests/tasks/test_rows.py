"""Rows of a file as a task: reading them, the split, and the order of the epochs."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from titan_rl import PromptTask, Rollout, RolloutGroup
from titan_rl.config.load import load_config
from titan_rl.config.task_tables import check_task, load_task
from titan_rl.config.validation_errors import Origins
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.tasks import Rows, ToolEnv

ROWS = [{"question": f"What is {a} + 1?", "answer": str(a + 1)} for a in range(100)]
REWARD = f"{__name__}:is_right"


def is_right(row: dict[str, Any], answer: str) -> bool:
    return answer.strip() == row["answer"]


def look(x: int) -> int:
    """Look."""
    return x


class Desk:
    """Class whose methods are tools."""

    def write(self, text: str) -> str:
        """Write."""
        return text


def write(folder: Path, name: str = "rows.jsonl", rows: Any = ROWS) -> str:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def make(folder: Path, **settings: Any) -> Rows:
    return Rows(**{"path": write(folder), "prompt": "question", "reward": REWARD, **settings})


def test_each_epoch_shuffles_all_rows_differently(tmp_path: Path) -> None:
    task = make(tmp_path)
    held_out = [row["answer"] for row in task.validation_samples(1000)]
    size = len(ROWS) - len(held_out)
    epochs = [[task.train_sample(3, index)["answer"] for index in range(size * e, size * (e + 1))] for e in range(2)]
    assert sorted(epochs[0] + held_out) == sorted(row["answer"] for row in ROWS)
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert task.train_sample(3, 7) == make(tmp_path).train_sample(3, 7)
    assert task.validation_samples(3) == task.validation_samples(1000)[:3]
    assert 0 < len(held_out) < 30


def test_held_out_rows_stay_held_out_when_rows_are_added(tmp_path: Path) -> None:
    before = make(tmp_path).validation_samples(1000)
    more = [{"question": f"What is {a} + 2?", "answer": str(a + 2)} for a in range(50)]
    after = make(tmp_path, path=write(tmp_path, "more.jsonl", more + ROWS)).validation_samples(1000)
    assert all(row in after for row in before)


def test_validation_path_replaces_the_held_out_share(tmp_path: Path) -> None:
    other = write(tmp_path, "test.jsonl", ROWS[:5])
    task = make(tmp_path, validation_path=other)
    assert sorted(row["answer"] for row in task.validation_samples(9)) == ["1", "2", "3", "4", "5"]
    assert len({task.train_sample(0, index)["answer"] for index in range(100)}) == 100


async def test_prompt_can_be_a_column_a_template_or_messages(tmp_path: Path) -> None:
    async def opening(**settings: Any) -> list[Any]:
        task = make(tmp_path, **settings)
        return list((await task.env(task.validation_samples(1)[0]).reset()).messages)

    (plain,) = await opening()
    assert plain["content"].startswith("What is ")
    (filled,) = await opening(prompt="Q: {question}\nA:")
    assert filled["content"] == f"Q: {plain['content']}\nA:"
    assert await opening(system="Be brief.") == [{"role": "system", "content": "Be brief."}, plain]
    chats = [{"prompt": [{"role": "user", "content": row["question"]}]} for row in ROWS]
    assert (await opening(path=write(tmp_path, "chats.jsonl", chats), prompt="prompt"))[0]["role"] == "user"


async def test_prompt_may_be_a_chat_of_sharegpt(tmp_path: Path) -> None:
    said = [("system", "Be brief."), ("human", "2 + 3?"), ("gpt", "4"), ("human", "No.")]
    rows = [{"conversations": [{"from": source, "value": value} for source, value in said]}] * 9
    task = make(tmp_path, path=write(tmp_path, "chats.jsonl", rows), prompt="conversations", held_out=0)
    task.check_settings()
    messages = (await task.env(task.train_sample(0, 0)).reset()).messages
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "Be brief."),
        ("user", "2 + 3?"),
        ("assistant", "4"),
        ("user", "No."),
    ]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "human", "content": "Hi"}, r'\[0\].role is "human"; it must be one of system, .*; write "user"'),
        ({"content": "Hi"}, r"\[0\].role is null; it must be one of system"),
        ({"from": "narrator", "value": "Hi"}, r'\[0\].from is "narrator"; it must be one of human'),
    ],
)
def test_message_of_an_unknown_role_is_refused(tmp_path: Path, message: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"task.prompt = 'prompt': row 0 of .* gives no prompt: the prompt{problem}"):
        make(tmp_path, path=write(tmp_path, "chats.jsonl", [{"prompt": [message]}]), prompt="prompt").check_settings()


HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{**HI, "wieght": 1}], r"\[0\]: wieght has no meaning in a chat here, .*; write weight for wieght"),
        ([{**HI, "content": 5}], r"\[0\].content must be a string, not 5"),
        ([{"role": "user", "contnet": "Hi"}], r"\[0\]: contnet has no meaning in a chat here, .*content for contnet"),
        ([{"role": "user"}], r"\[0\].content must be a string, not null"),
        ([{"from": "human", "vlaue": "Hi"}], r"\[0\]: vlaue has no meaning in a chat here, which has from, value"),
        ([HI, HELLO, HELLO], r"\[1\] and \[2\] are both from the assistant"),
        ([HI, {**HELLO, "prefix": True}, HI], r"\[1\].prefix is true, but no message of the assistant follows"),
        ([{**HI, "tool_calls": [{"function": {"name": "f"}}]}], r"\[0\].tool_calls has a meaning only in a message of"),
    ],
)
def test_wrong_message_of_any_row_is_refused(tmp_path: Path, messages: Any, problem: str) -> None:
    path = write(tmp_path, "chats.jsonl", [{"prompt": [HI]}, {"prompt": messages}])
    with pytest.raises(ConfigError, match=rf"row 1 of .* gives no prompt: the prompt{problem}"):
        make(tmp_path, path=path, prompt="prompt", held_out=0).check_settings()


def test_prompt_of_a_task_has_the_checks_of_rows() -> None:
    class Greets(PromptTask):
        def sample(self, rng: random.Random) -> int:
            return 1

        def prompt(self, sample: int) -> Any:
            return [{**HI, "wieght": 1}]

        def reward(self, sample: int, text: str) -> float:
            return 1.0

    with pytest.raises(DataError, match=r"the prompt\[0\]: wieght has no meaning in a chat here"):
        Greets().env(1)


async def test_last_message_of_a_prompt_may_be_marked_as_the_beginning_of_the_answer(tmp_path: Path) -> None:
    path = write(tmp_path, "chats.jsonl", [{"prompt": [HI, {**HELLO, "prefix": True}]}] * 2)
    task = make(tmp_path, path=path, prompt="prompt", held_out=0)
    task.check_settings()
    assert list((await task.env(task.train_sample(0, 0)).reset()).messages) == [HI, {**HELLO, "prefix": True}]


async def test_reward_function_and_tools_apply_to_rows(tmp_path: Path) -> None:
    task = make(tmp_path, tools=(f"{__name__}:look", f"{__name__}:Desk"))
    row = task.train_sample(0, 0)
    env = task.env(row)
    assert isinstance(env, ToolEnv)
    assert list(env.tools) == ["look", "write"]
    rollout = Rollout("g/0", "g", 0, row, messages=[{"role": "assistant", "content": f" {row['answer']}"}])
    await task.rubric().score(RolloutGroup("g", row, [rollout]))
    assert (rollout.reward, rollout.reward_breakdown) == (1.0, {"is_right": 1.0})


def test_demonstration_column(tmp_path: Path) -> None:
    answers = {row["question"]: row["answer"] for row in ROWS}
    task = make(tmp_path, demonstration="answer")
    task.check_settings()
    held_out = [row["question"] for row in task.validation_samples(1000)]
    for shown in task.demonstrations(50):
        asked, answered = (message["content"] for message in shown.messages)
        assert answered == answers[asked]
        assert asked not in held_out
    with pytest.raises(ConfigError, match="names no column with answers to train on"):
        list(make(tmp_path).demonstrations(1))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"prompt": "text"},
            "task.prompt = 'text': row 0 of .* has no column 'text'; its columns are question, answer",
        ),
        ({"prompt": "{text}!"}, "has no column 'text'"),
        ({"prompt": "{question"}, "gives no prompt"),
        ({"demonstration": "steps"}, "not all rows of .* have such a column"),
        ({"held_out": 1e-9}, "and 0 held out; give more rows, another share, or a task.validation_path"),
    ],
)
def test_check_settings_finds_unusable_settings(tmp_path: Path, settings: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make(tmp_path, **settings).check_settings()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"prompt": "text"}, r"run\.toml: tasks\.sums\.prompt = 'text': row 0"),
        ({"path": "nowhere.jsonl"}, r"run\.toml: tasks\.sums: .*nowhere.jsonl cannot be read"),
    ],
)
def test_error_names_the_task_with_invalid_rows(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_task(make(tmp_path, **settings), Origins((Path("run.toml"),)), "tasks.sums")


def test_task_defined_by_toml_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    write(folder)
    (tmp_path / "rewards_of_mine.py").write_text("def right(row, answer):\n    return 1.0\n")
    toml = '[model]\npath = "m"\n[task]\ntype = "titan_rl.tasks:Rows"\npath = "rows.jsonl"\n'
    (folder / "run.toml").write_text(f'{toml}prompt = "question"\nreward = "rewards_of_mine:right"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = load_config(folder / "run.toml", check_files=False).tasks[0].task
    assert isinstance(task, Rows)
    assert task.path == str(folder / "rows.jsonl")
    (folder / "run.toml").write_text(f'{toml}reward = "rewards_of_mine:wrong"\n')
    with pytest.raises(ConfigError, match="rewards_of_mine has no function wrong; it has: right"):
        load_config(folder / "run.toml", check_files=False)


def test_rejects_a_reward_that_names_no_function() -> None:
    with pytest.raises(ConfigError, match=r'task.reward = .x.*must be "module:function"'):
        load_task({"type": "titan_rl.tasks:Rows", "path": "a.jsonl", "reward": "x"}, Origins((Path("run.toml"),)))
