"""Examples of docs/how_to/several_tasks.md work as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from titan_rl.config.load import load_config
from titan_rl.scheduling.task_mix import TaskMix, WeightedTask

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how_to/several_tasks.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_tables_on_the_page_are_a_valid_config(tmp_path: Path) -> None:
    tasks, suites = blocks("toml")
    (tmp_path / "run.toml").write_text(f"{tasks}\n{suites}")
    config = load_config(tmp_path / "run.toml", check_files=False)
    assert [(source.name, source.weight) for source in config.tasks] == [("long", 3.0), ("short", 1.0)]
    assert [(suite.name, suite.interval, suite.temperature) for suite in config.suites] == [
        ("long", 20, 0.0),
        ("longest", 40, 1.0),
    ]


def test_curriculum_on_the_page_repeats_a_sample_until_solved() -> None:
    (code,) = blocks("python")
    names: dict[str, Any] = {"__name__": "several_tasks_page"}
    exec(code, names)
    mix, given = TaskMix({"task": WeightedTask(1.0, names["UntilSolved"]())}), list[int]()
    for index, reward in enumerate([1.0, 0.0, 0.0, 1.0, 1.0]):
        given.append(mix.assignment(index).sample)
        mix.finished(index, [0.0, reward])
    assert given == [0, 1, 1, 1, 2]
