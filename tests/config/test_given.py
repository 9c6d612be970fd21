"""Settings that Python gives: they mean what they mean on the command line."""

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


def config_of(text: str, *, is_read: bool) -> Any:
    """The file, or what is read of it."""
    Path("given.toml").write_text(HEAD + text)
    return load_config("given.toml", check_files=False) if is_read else "given.toml"


def given(config: Any, overrides: dict[str, Any], **more: Any) -> RunConfig:
    return given_config(config, functions={}, overrides=overrides, check_files=False, **more)


def words(source: TaskSource) -> list[str]:
    task: Any = source.task
    return list(task.words)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize(
    ("text", "overrides", "now"),
    [
        (ONE, {"task.words": ["eggs"]}, [(["eggs"], 1.0)]),
        (ONE, {"task": {"words": ["eggs"]}}, [(["eggs"], 1.0)]),
        (ONE, {"task.words": ("eggs", "ham")}, [(["eggs", "ham"], 1.0)]),
        (SEVERAL, {"tasks.ham.weight": 7.0}, [(["ham"], 7.0), (["eggs"], 1.0)]),
        (SEVERAL, {"tasks.echo.words": ["spam"], "tasks": {"ham": {"weight": 2}}}, [(["ham"], 2.0), (["spam"], 1.0)]),
    ],
)
def test_a_tasks_settings_are_settings(
    project: Path, is_read: bool, text: str, overrides: dict[str, Any], now: list[tuple[list[str], float]]
) -> None:
    config = given(config_of(text, is_read=is_read), overrides)
    assert [(words(source), source.weight) for source in config.tasks] == now


@pytest.mark.parametrize("is_read", [False, True])
def test_what_a_task_has_instead_of_a_table_keeps_its_other_settings(project: Path, is_read: bool) -> None:
    config = given(config_of(SEVERAL, is_read=is_read), {"tasks.ham.sampling.max_tokens": 5})
    assert (config.tasks[0].sampling.max_tokens, config.tasks[0].sampling.temperature) == (5, 0.5)
    assert config.tasks[1].sampling.max_tokens is None


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize(
    ("text", "overrides", "says"),
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
def test_an_error_names_the_arguments(
    project: Path, is_read: bool, text: str, overrides: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        given(config_of(text, is_read=is_read), overrides)
    assert says in str(caught.value)


def test_a_files_task_may_be_another_class(project: Path) -> None:
    config = given(config_of(ONE.replace("Echo", "Half"), is_read=False), {"task.type": "echo_task:Echo"})
    assert words(config.tasks[0]) == ["ham"]


def test_the_task_that_is_given_has_the_settings(project: Path) -> None:
    config = config_of(SEVERAL, is_read=False)
    task: Any = load_config(config, check_files=False).tasks[1].task
    made = given(config, {"task.words": ["spam"], "training.steps": 3}, task=task)
    assert [words(source) for source in made.tasks] == [["spam"]]
    assert made.training.steps == 3
    assert list(task.words) == ["eggs"]


@pytest.mark.parametrize("is_read", [False, True])
def test_a_table_within_a_table_has_settings(project: Path, is_read: bool) -> None:
    overrides = {"generation.speculative.method": "ngram", "generation.speculative.num_speculative_tokens": 2}
    config = given(config_of(ONE + "[generation]\nnum_generators = 2\n", is_read=is_read), overrides)
    assert (config.generation.speculative.method, config.generation.speculative.num_speculative_tokens) == ("ngram", 2)
    assert config.generation.num_generators == 2


SUITE = """
[[validation.suites]]
type = "echo_task:Echo"
words = ["spam"]
name = "held_out"
"""


@pytest.mark.parametrize("is_read", [False, True])
def test_suites_with_tasks_of_their_own_stay_when_their_table_is_changed(project: Path, is_read: bool) -> None:
    config = given(config_of(ONE + SUITE, is_read=is_read), {"validation.num_prompts": 8})
    assert [(suite.name, words(suite.source), suite.num_prompts) for suite in config.suites] == [
        ("held_out", ["spam"], 8)
    ]


def test_a_table_that_is_not_there_is_named(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[generation.speculate\] is not a table; nearest: generation.speculative"):
        given(config_of(ONE, is_read=True), {"generation.speculate.method": "ngram"})


def test_a_task_that_is_not_changed_stays_the_object_it_is(project: Path) -> None:
    config = config_of(SEVERAL, is_read=True)
    made = given(config, {"tasks.ham.weight": 7})
    assert made.tasks[1].task is config.tasks[1].task
    assert made.tasks[0].task is not config.tasks[0].task


def test_a_file_needs_not_be_right_where_it_is_overridden(project: Path) -> None:
    text = ONE + "[training]\nsteps = -1\n"
    assert given(config_of(text, is_read=False), {"training.steps": 3}).training.steps == 3
