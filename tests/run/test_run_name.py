"""Names of run directories, and the link to the latest run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from user_project import project

from titan_rl.config.load import load_config
from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.errors import ConfigError
from titan_rl.run.directory import RunDirectory, run_name

__all__ = ["project"]


@pytest.fixture
def config(project: Path) -> RunConfig:
    return load_config("config.toml")


@pytest.mark.parametrize(
    ("tomls", "overrides", "name"),
    [
        ([], [], "echo"),
        (["cpu.toml"], [], "echo"),
        (["cpu.toml", "recipes/long.toml"], [("training.lr", "1e-3")], "echo-long-lr=1e-3"),
        ([], [("training.betas", "[0.8, 0.9]"), ("task.style", "loud")], "echo-betas=0.8_0.9-style=loud"),
        ([], [("model.path", "/models/Qwen3-0.6B/"), ("run_dir", "b")], "echo-path=Qwen3-0.6B"),
        (
            [],
            [("training.lr", "1"), ("seed", "2"), ("task.style", "a"), ("rollout.group_size", "4"), ("name", "")],
            "echo-lr=1-seed=2-style=a-+1",
        ),
        ([], [("seed", "1"), ("logging.sinks", '["wandb"]'), ("seed", "2")], "echo-seed=2"),
    ],
)
def test_run_name_consists_of_the_task_and_overrides(config: RunConfig, tomls, overrides, name: str):
    assert run_name(config, [Path(toml) for toml in tomls], overrides) == name


def test_name_setting_replaces_the_generated_name(project: Path):
    config = load_config("config.toml", [("name", "baseline")])
    assert run_name(config, [], [("name", "baseline"), ("seed", "3")]) == "baseline"
    assert re.fullmatch(r"\d{8}-\d{6}-baseline", RunDirectory.create(config).path.name)
    with pytest.raises(ConfigError, match=r"name = .\.\./up"):
        load_config("config.toml", [("name", "../up")])


@given(overrides=st.lists(st.tuples(st.text(max_size=9), st.text(max_size=90)), max_size=9))
def test_run_name_is_always_a_valid_file_name(overrides: list[tuple[str, str]]):
    class Task:
        pass

    config = RunConfig.model_construct(name="", tasks=(TaskSource.model_construct(task=Task(), name="task"),))
    assert re.fullmatch(r"[\w.+=-]{1,80}", run_name(config, [Path("a"), Path("b" * 99)], overrides), re.ASCII)


def test_latest_links_to_the_most_recent_run(config: RunConfig):
    first, second = RunDirectory.create(config), RunDirectory.create(config)
    assert os.readlink("runs/latest") == second.path.name
    first.become_latest()
    assert os.readlink("runs/latest") == first.path.name


def test_copied_run_does_not_become_latest(tmp_path: Path):
    RunDirectory(tmp_path / "copies" / "of_a_run").become_latest()
    assert not (tmp_path / "copies" / "latest").is_symlink()
