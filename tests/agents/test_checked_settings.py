"""Validation of an agent's settings before a run begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from user_project import project

from titan_rl.config.load import load_config
from titan_rl.core.errors import ConfigError, ModelError

__all__ = ["project"]

CONFIG = """
model.path = "policy"
task.type = "titan_rl.tasks.agents:AgentTask"
task.command = ["{python}", "{cwd}/agent.py", "{question}"]
task.train_file = "train.jsonl"
training.steps = 5
"""


@pytest.fixture
def config(project: Path) -> str:
    Path("train.jsonl").write_text('{"question": "a"}\n\n{"question": "b"}\n')
    Path("bad.jsonl").write_text('{"question": "a"}\n{"question"\n')
    Path("words.jsonl").write_text('"a"\n')
    Path("empty.jsonl").write_text("\n")
    Path("agent.sh").write_text("#!/bin/sh\n")
    Path("agent.sh").chmod(0o755)
    Path("agent.toml").write_text(CONFIG)
    return "agent.toml"


@pytest.mark.parametrize("command", [[], ["sh", "{{}}"], ["{cwd}/agent.sh"], ["{python}"]])
def test_accepts_startable_commands(config: str, command: list[str]) -> None:
    assert load_config(config)
    assert load_config(config, [("task.command", json.dumps(command))])


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("command", 'python "my agent.py" {question}', 'a list of words: ["python", "my agent.py", "{question}"]'),
        (
            "command",
            '["python agent.py {question}"]',
            'must be an item: ["python", "agent.py", "{question}"]',
        ),
        ("command", '["no-such-program"]', "begins with 'no-such-program', which is not an executable program"),
        ("command", '["./agent.sh"]', "each program starts in its own folder; write '{cwd}/agent.sh'"),
        ("command", '[""]', "name a program, or leave the setting out"),
        ("command", '["sh", "{qestion}"]', "task.command: '{qestion}' names 'qestion'; the sample has question"),
        ("command", '["{python"]', "task.command: '{python' has a single brace"),
        ("environment", '{CITY = "{city}"}', "task.environment.CITY: '{city}' names 'city'; the sample has question"),
        ("train_file", "", "task.train_file is not set"),
        ("train_file", "none.jsonl", "there is no file 'none.jsonl'"),
        (
            "train_file",
            "empty.jsonl",
            "empty.jsonl has no rows",
        ),
        ("train_file", "bad.jsonl", "bad.jsonl:2 is not valid JSON: Expecting ':' delimiter"),
        ("train_file", "words.jsonl", 'words.jsonl:1 is not a JSON object: "a"'),
        ("validation_file", "bad.jsonl", "bad.jsonl:2 is not valid JSON: "),
    ],
)
def test_rejects_settings_that_cannot_work(config: str, setting: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config, [(f"task.{setting}", value)])
    assert message in str(caught.value)


def test_error_of_a_failing_task_names_its_line(config: str) -> None:
    Path("unlucky.py").write_text(
        "from titan_rl.tasks.agents import AgentTask\n"
        "class Own(AgentTask):\n"
        "    def train_sample(self, seed, index): return {}['city']\n"
    )
    with pytest.raises(ConfigError, match=r"could not be checked: KeyError: 'city' \(unlucky.py:3 in train_sample\)"):
        load_config(config, [("task.type", "unlucky:Own")])


def test_rejects_a_model_without_a_chat_template(config: str) -> None:
    Path("policy/chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"no chat template.*add a chat_template\.jinja"):
        load_config(config)
    Path("policy/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert load_config(config)
