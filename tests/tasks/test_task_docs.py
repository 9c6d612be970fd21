"""Files and snippets of docs/how_to/tasks.md, which are written to a folder and run."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from chatting import play

from titan_rl import Rows, ToolEnv, load_config, tools_of
from titan_rl.tasks.tools import FAULTS

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "tasks.md").read_text()
NAMED = re.findall(r"\*\*([\w.]+)\*\*[^`]*?```\w+\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder with the page's files, whose modules can be imported."""
    for name, text in NAMED:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, _ in NAMED:
        sys.modules.pop(name.removesuffix(".py"), None)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_page_has_the_expected_files() -> None:
    assert [name for name, _ in NAMED] == [
        "sums.py", "sums.toml", "questions.jsonl", "rewards.py", "questions.toml", "shop.py", "riddle.py",
        "test_rated.py", "test_sums.py",
    ]  # fmt: skip


async def test_single_turn_section() -> None:
    task: Any = load_config("sums.toml", check_files=False).tasks[0].task
    assert type(task) is module("sums").Sums
    assert (await play(task, (2, 3), lambda messages: " 5")).reward == 1.0


async def test_rows_section() -> None:
    task = load_config("questions.toml", check_files=False).tasks[0].task
    assert isinstance(task, Rows)
    task.check_settings()
    (row,) = task.validation_samples(1)
    rollout = await play(task, row, lambda messages: f"It is {row['answer']}.")
    assert rollout.messages[0]["content"] == f"{row['question']} Answer in a word."
    assert rollout.reward == 1.0


def test_rows_settings_table_is_complete() -> None:
    documented = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", PAGE, re.MULTILINE))
    for name, info in Rows.model_fields.items():
        shown = {None: "none", False: "`false`", (): "`[]`", 0.1: "`0.1`"}
        default = f'`"{info.default}"`' if isinstance(info.default, str) else shown.get(info.default)
        assert documented[name].strip() == ("" if info.is_required() else default), name


async def test_tools_section() -> None:
    shop = module("shop")
    names = [tool.name for tool in tools_of(shop.Till())]
    assert names == ["price", "take"]
    rollout = await play(
        shop.Shop(), ("plum", 3), lambda messages: shop.Shop().demonstrate(("plum", 3), messages, None)
    )
    assert ([message["content"] for message in rollout.messages][2:], rollout.reward) == (["3", "9"], 1.0)
    step = await ToolEnv("?", shop.Till()).step(shop.call_of("take", {"coins": 0}))
    assert step.messages[0]["content"] == "Error: ValueError: take at least one coin"
    assert step.messages[0]["content"] in PAGE
    assert all(f"`{fault.__name__}`" in PAGE for fault in FAULTS if fault.__module__ == "builtins")


def test_tool_limits_snippet() -> None:
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "PatientShop" in block]
    names: dict[str, Any] = {}
    exec(block, names)
    assert isinstance(names["PatientShop"]().env(("nut", 1)), ToolEnv)


async def test_conversations_section() -> None:
    riddle = module("riddle")
    answers = iter(["rain", "the night"])
    rollout = await play(riddle.Riddles(), "It falls and never breaks. What is it?", lambda messages: next(answers))
    assert (rollout.messages[2]["content"], rollout.reward) == ("No. It begins with n.", 0.5)


def test_example_test_file_passes() -> None:
    tests = module("test_sums")
    tests.test_correct_sum_earns_the_full_reward()
    asyncio.run(asyncio.to_thread(tests.test_demonstrations_vary))
