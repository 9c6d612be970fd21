"""Overrides passed from Python have the same meaning as options of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.load import given_config, load_config
from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.errors import ConfigError

HEAD = """
[model]
path = "policy"
"""

SEVERAL = """
[[tasks]]
name = "ham"
weight = 3
type = "echo_task:Echo"
words = ["ham"]
sampling = {temperature = 0.5}

[[tasks]]
type = "echo_task:Echo"
words = ["eggs"]
"""

ONE = """
[task]
type = "echo_task:Echo"
words = ["ham"]
"""


def config_of(text: str, *, is_loaded: bool) -> Any:
    """Path of the config file, or the config loaded from it."""
    Path("given.toml").write_text(HEAD + text)
    return load_config("given.toml", check_files=False) if is_loaded else "given.toml"


def given(config: Any, overrides: dict[str, Any], **more: Any) -> RunConfig:
    return given_config(config, functions={}, overrides=overrides, check_files=False, **more)


def words(source: TaskSource) -> list[str]:
    task: Any = source.task
    return list(task.words)


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (ONE, {"task.words": ["eggs"]}, [(["eggs"], 1.0)]),
        (ONE, {"task": {"words": ["eggs"]}}, [(["eggs"], 1.0)]),
        (ONE, {"task.words": ("eggs", "ham")}, [(["eggs", "ham"], 1.0)]),
        (SEVERAL, {"tasks.ham.weight": 7.0}, [(["ham"], 7.0), (["eggs"], 1.0)]),
        (SEVERAL, {"tasks.echo.words": ["spam"], "tasks": {"ham": {"weight": 2}}}, [(["ham"], 2.0), (["spam"], 1.0)]),
    ],
)
def test_overrides_change_task_settings(
    project: Path, is_loaded: bool, text: str, overrides: dict[str, Any], expected: list[tuple[list[str], float]]
) -> None:
    config = given(config_of(text, is_loaded=is_loaded), overrides)
    assert [(words(source), source.weight) for source in config.tasks] == expected


@pytest.mark.parametrize("is_loaded", [False, True])
def test_override_in_a_task_table_keeps_its_other_settings(project: Path, is_loaded: bool) -> None:
    config = given(config_of(SEVERAL, is_loaded=is_loaded), {"tasks.ham.sampling.max_tokens": 5})
    assert (config.tasks[0].sampling.max_tokens, config.tasks[0].sampling.temperature) == (5, 0.5)
    assert config.tasks[1].sampling.max_tokens is None


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (ONE, {"training.stepps": 3}, "arguments: training.stepps = 3 is not a setting; nearest: training.steps"),
        (ONE, {"training": {"lr": "much"}}, "arguments: training.lr = 'much' must be"),
        (ONE, {"task.wordz": ["eggs"]}, "arguments: task.wordz = ['eggs'] is not a setting; nearest: task.words"),
        (ONE, {"task.words": 3}, "arguments: task.words = 3 must be a list"),
        (
            SEVERAL,
            {"tasks.ham.wieght": 3},
            "tasks.ham.wieght = 3 is not a setting; nearest: tasks.ham.weight",
        ),
    ],
)
def test_errors_name_the_arguments(
    project: Path, is_loaded: bool, text: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        given(config_of(text, is_loaded=is_loaded), overrides)
    assert message in str(caught.value)


def test_override_can_replace_the_task_class(project: Path) -> None:
    config = given(config_of(ONE.replace("Echo", "Half"), is_loaded=False), {"task.type": "echo_task:Echo"})
    assert words(config.tasks[0]) == ["ham"]


def test_overrides_apply_to_a_task_passed_as_an_object(project: Path) -> None:
    config = config_of(SEVERAL, is_loaded=False)
    task: Any = load_config(config, check_files=False).tasks[1].task
    changed = given(config, {"task.words": ["spam"], "training.steps": 3}, task=task)
    assert [words(source) for source in changed.tasks] == [["spam"]]
    assert changed.training.steps == 3
    assert list(task.words) == ["eggs"]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_overrides_reach_nested_tables(project: Path, is_loaded: bool) -> None:
    overrides = {"generation.speculative.method": "ngram", "generation.speculative.num_speculative_tokens": 2}
    config = given(config_of(ONE + "[generation]\nnum_generators = 2\n", is_loaded=is_loaded), overrides)
    assert (config.generation.speculative.method, config.generation.speculative.num_speculative_tokens) == ("ngram", 2)
    assert config.generation.num_generators == 2


SUITE = """
[[validation.suites]]
type = "echo_task:Echo"
words = ["spam"]
name = "held_out"
"""


@pytest.mark.parametrize("is_loaded", [False, True])
def test_overriding_validation_keeps_suites_with_their_own_task(project: Path, is_loaded: bool) -> None:
    config = given(config_of(ONE + SUITE, is_loaded=is_loaded), {"validation.num_prompts": 8})
    assert [(suite.name, words(suite.source), suite.num_prompts) for suite in config.suites] == [
        ("held_out", ["spam"], 8)
    ]


def test_unknown_table_is_named(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[generation.speculate\] is not a table; nearest: generation.speculative"):
        given(config_of(ONE, is_loaded=True), {"generation.speculate.method": "ngram"})


def test_unchanged_task_keeps_its_identity(project: Path) -> None:
    config = config_of(SEVERAL, is_loaded=True)
    changed = given(config, {"tasks.ham.weight": 7})
    assert changed.tasks[1].task is config.tasks[1].task
    assert changed.tasks[0].task is not config.tasks[0].task


def test_invalid_value_in_the_file_can_be_overridden(project: Path) -> None:
    text = ONE + "[training]\nsteps = -1\n"
    assert given(config_of(text, is_loaded=False), {"training.steps": 3}).training.steps == 3
