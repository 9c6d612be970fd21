"""The value "none" resets an optional setting to its default, from any source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.load import dump_config, given_config, load_config
from titan_rl.config.resume_changes import settings_of
from titan_rl.core.errors import ConfigError

SET = """
[sampling]
seeded = true
[scheduling]
max_running_rollouts = 40
max_group_age = 3
[generation]
max_running = "auto"
gpu_share = 0.5
[statedict]
tolerance = 0.5
"""


@pytest.mark.parametrize("source", ["command line", "file", "Python"])
def test_none_unsets_a_value_of_a_file(project: Path, source: str):
    Path("set.toml").write_text(SET)
    Path("unset.toml").write_text(
        '[sampling]\nseeded = "none"\n[scheduling]\nmax_running_rollouts = "none"\n[generation]\nmax_running = "none"\n'
    )
    overrides = {"sampling.seeded": "none", "scheduling.max_running_rollouts": "none", "generation.max_running": "none"}
    files = ["config.toml", "set.toml"]
    assert load_config(files).sampling.seeded is True
    match source:
        case "command line":
            config = load_config(files, list(overrides.items()))
        case "file":
            config = load_config([*files, "unset.toml"])
        case _:
            config = given_config(load_config(files), functions={}, overrides=overrides, check_files=True)
    scheduling, generation = config.scheduling, config.generation
    assert (config.sampling.seeded, scheduling.max_running_rollouts, generation.max_running) == (None, None, None)
    assert (scheduling.max_group_age, generation.gpu_share, config.statedict.tolerance) == (3, 0.5, 0.5)
    Path("dumped.toml").write_text(dump_config(config))
    assert settings_of(load_config("dumped.toml")) == settings_of(config)


def test_none_unsets_a_setting_of_a_task(project: Path):
    own = 'advantage = "group_mean"\nsampling = {temperature = 0.5}'
    task = f'[[tasks]]\nname = "ham"\ntype = "echo_task:Echo"\n{own}\n'
    Path("tasks.toml").write_text(f'[model]\npath = "policy"\n{task}')
    config = load_config("tasks.toml", [("tasks.ham.advantage", "none"), ("tasks.ham.sampling.temperature", "none")])
    (source,) = config.tasks
    assert (source.advantage, source.sampling.temperature) == (None, None)


def test_none_unsets_a_task_field_unless_none_is_one_of_its_values(project: Path):
    Path("worded_task.py").write_text(
        "from typing import Literal\n"
        "from echo_task import Echo\n"
        "class Worded(Echo):\n"
        "    limit: int | None = 3\n"
        "    tone: Literal['none', 'warm'] | None = None\n"
    )
    overrides = [("task.type", "worded_task:Worded"), ("task.limit", "none"), ("task.tone", "none")]
    task: Any = load_config("config.toml", overrides).tasks[0].task
    assert (task.limit, task.tone) == (None, "none")


def test_none_is_kept_as_a_choice_and_rejected_for_required_settings(project: Path):
    config = load_config("config.toml", [("correction.weight", "none"), ("generation.speculative.method", "none")])
    assert (config.correction.weight, config.generation.speculative.method) == ("none", "none")
    with pytest.raises(ConfigError, match=r"command line: training\.max_grad_norm = 'none' must be a valid number"):
        load_config("config.toml", [("training.max_grad_norm", "none")])
