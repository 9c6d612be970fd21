"""Settings in docs/how_to/adapters.md, loaded unchanged and played with the libraries that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from adapters.fake_openenv import observed, serving
from adapters.playing import calling, play
from byte_tokenizer import byte_tokenizer

from titan_rl import ChatTemplateRenderer, load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "adapters.md").read_text()
BASE = [("model.path", str(ROOT / "examples" / "alphabet_sort" / "base")), ("model.max_context", "256")]


def shown(section: str, language: str = "toml") -> list[str]:
    """Code blocks of a language in a section of the page."""
    _, _, text = PAGE.partition(f"\n## {section}\n")
    return re.findall(rf"```{language}\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_reasoning_gym(number: int, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(shown("reasoning-gym")[number])
    task = load_config(tmp_path / "run.toml", BASE).tasks[0].task
    assert task.train_sample(0, 0) == task.train_sample(0, 0)
    assert len(task.validation_samples(3)) == 3


async def test_textarena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (players,) = shown("textarena", "python")
    (tmp_path / "players.py").write_text(players)
    alone, together = shown("textarena")
    (tmp_path / "alone.toml").write_text(alone)
    (tmp_path / "together.toml").write_text(together)
    task = load_config("alone.toml", BASE).tasks[0].task
    group = await play(task, task.train_sample(0, 0), lambda _: "[21]")
    assert group.rollouts[0].reward_breakdown["invalid_moves"] == 1.0
    task = load_config("together.toml", BASE).tasks[0].task
    games = [task.make_env(task.train_sample(0, index), ChatTemplateRenderer(byte_tokenizer())) for index in range(9)]
    scripts = [game.players(0)[seat] for game in games for seat in task.seat_names if game.players(0)[seat] != "policy"]
    assert len(scripts) == 9
    assert scripts[0].reply([{"role": "user", "content": "Available Moves: '[3]', '[4]'"}]) == "[3]"


def trl_task(section: str, module: str, data: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    for name, language in ((module, "python"), (data, "json"), ("run.toml", "toml")):
        (text,) = shown(section, language)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    return load_config("run.toml", BASE).tasks[0].task


async def test_trl_rows_and_reward_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = trl_task("Rows and reward functions of TRL", "rewards.py", "sums.jsonl", tmp_path, monkeypatch)
    row = task.train_sample(0, 0)
    group = await play(task, row, lambda _: row["answer"], lambda _: "?")
    assert [rollout.reward for rollout in group.rollouts] == pytest.approx([1 - len(row["answer"]) / 1000, -0.001])


async def test_trl_classes_with_tool_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = trl_task("Classes with tool methods", "counter.py", "counter.jsonl", tmp_path, monkeypatch)
    row = task.train_sample(0, 0)

    def counts(messages: Any) -> Any:
        return "Done." if messages[-1]["role"] == "tool" else calling("add", number=row["target"])

    group = await play(task, row, counts, lambda _: "Done.")
    assert group.rollouts[0].messages[0]["content"] == f"Use your tools. Count to {row['target']}."
    assert [rollout.reward for rollout in group.rollouts] == [2.0, 1.0]


async def test_openenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (functions,), (settings,) = shown("OpenEnv", "python"), shown("OpenEnv")
    (tmp_path / "guessing.py").write_text(functions)
    (tmp_path / "run.toml").write_text(settings)

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        right = message["data"].get("guess") == 7
        return observed({"hint": "right" if right else "higher"}, reward=float(right), done=right)

    async with serving(answer) as server:
        task = load_config("run.toml", [*BASE, ("task.url", server.url)]).tasks[0].task
        replies = iter(["Hm.", "Is it 3?", "7"])
        (rollout,) = (await play(task, task.train_sample(0, 0), lambda _: next(replies))).rollouts
    assert rollout.reward_breakdown == {"reward": 1.0, "invalid_actions": 1.0}
    assert rollout.messages[0]["content"] == "Guess my number.\n\nhigher"
    assert "say a number" in rollout.messages[2]["content"]
