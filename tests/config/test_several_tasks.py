"""The tables [[tasks]]: settings of each task, suites, curricula, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.build import make_filters
from titan_rl.config.load import dump_config, load_config
from titan_rl.config.resume_changes import check_options, check_unchanged, is_resumable, settings_of
from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource, name_of
from titan_rl.core.errors import ConfigError
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.scheduling.curriculum import ByDifficulty

pytest_plugins = ["user_project"]

HEAD = """
[model]
path = "policy"

[rollout]
max_turns = 5

[sampling]
max_tokens = 32
"""

SEVERAL = """
[[tasks]]
name = "ham"
weight = 3
type = "echo_task:Echo"
words = ["ham"]
rollout = {max_turns = 1}
sampling = {temperature = 0.5}
advantage = "group_mean"
filters = ["zero_variance"]

[[tasks]]
type = "echo_task:Echo"
words = ["eggs"]
"""


def load(text: str, *overrides: tuple[str, str]) -> RunConfig:
    Path("config.toml").write_text(HEAD + text)
    return load_config("config.toml", overrides, check_files=False)


def failure(text: str, *overrides: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


def words(source: TaskSource) -> Any:
    return source.task.train_sample(0, 0)


def test_task_has_a_name_a_weight_and_its_own_overrides(project: Path):
    config = load(SEVERAL)
    ham, echo = config.tasks
    assert (ham.name, ham.weight, words(ham)) == ("ham", 3.0, "ham")
    assert (echo.name, echo.weight, words(echo)) == ("echo", 1.0, "eggs")
    assert [config.limits_of(source).max_turns for source in config.tasks] == [1, 5]
    assert [config.sampling_of(source).temperature for source in config.tasks] == [0.5, 1.0]
    assert [config.sampling_of(source).max_tokens for source in config.tasks] == [32, 32]
    assert [config.advantage_of(source) for source in config.tasks] == ["group_mean", "standardized"]


def test_tasks_option_with_a_single_task_suggests_task_options(project: Path):
    message = failure('[task]\ntype = "echo_task:Echo"\n', ("tasks.echo.weight", "2"))
    assert message.startswith(
        "command line: --tasks.echo.weight: there is one [task], whose settings are options --task."
    )
    assert "a table [[tasks]] in the file" in message


def test_task_filters_apply_only_to_its_groups(project: Path):
    check = make_filters(load(SEVERAL))[-1]

    def same_rewards(task: str) -> RolloutGroup:
        rollouts = [Rollout(f"g/{i}", "g", i, None, reward=1.0, advantage=0.0) for i in range(2)]
        return RolloutGroup("g", None, rollouts, task=task)

    assert check(same_rewards("ham")) == "zero_variance"
    assert check(same_rewards("echo")) is None


@pytest.mark.parametrize("text", [SEVERAL, '[task]\ntype = "echo_task:Echo"\n', SEVERAL.partition("\n\n")[0]])
def test_dumped_config_loads_the_same_tasks(project: Path, text: str):
    config = load(text)
    dumped = dump_config(config)
    Path("again.toml").write_text(dumped)
    assert load_config("again.toml", check_files=False) == config
    assert ("[task]" in dumped) == ("[task]" in text)


def test_command_line_overrides_a_task_by_name(project: Path):
    config = load(SEVERAL, ("tasks.ham.weight", "9"), ("tasks.echo.words", '["spam"]'), ("tasks.echo.name", "spam"))
    assert [source.weight for source in config.tasks] == [9.0, 1.0]
    assert [source.name for source in config.tasks] == ["ham", "spam"]
    assert words(config.tasks[1]) == "spam"
    more = load(SEVERAL, ("tasks.third.type", "echo_task:Echo"))
    assert [source.name for source in more.tasks] == ["ham", "echo", "third"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tasks.ham.weight", "0"), "command line: tasks.ham.weight = 0 must be greater than 0"),
        (("tasks.ham.weight", "nan"), "tasks.ham.weight = nan must be "),
        (("tasks.ham.weight", "-1"), "tasks.ham.weight = -1 must be greater than 0"),
        (("tasks.ham.wieght", "2"), "tasks.ham.wieght = 2 is not a setting; nearest: tasks.ham.weight"),
        (("tasks.ham.wurds", "[]"), "tasks.ham.wurds = [] is not a setting; nearest: tasks.ham.words"),
        (("tasks.ham.lenght", "2"), "nearest: tasks.ham.length"),
        (("tasks.ham.length", '"two"'), "tasks.ham.length = 'two' must be a valid integer"),
        (("tasks.ham.rollout.max_turn", "2"), "nearest: tasks.ham.rollout.max_turns"),
        (("tasks.ham.rollout", "2"), "tasks.ham.rollout = 2 must be a table"),
        (("tasks.ham.filters", '["zero_varianse"]'), "tasks.ham.filters[0] = 'zero_varianse' must be one of zero_var"),
        (("tasks.ham.advantage", "no_module:f"), "tasks.ham.advantage"),
        (("tasks.ham.name", '"echo"'), "2 tasks have name = 'echo'"),
        (("tasks.ham.name", '"h m"'), "tasks.ham.name = 'h m'"),
        (
            ("tasks.hem.weight", "2"),
            'command line: tasks.hem has no type = "module:Class"; nearest: tasks.ham; tasks with one: ham, echo',
        ),
        (("tasks.ham.type", "echo_task:Eco"), "tasks.ham.type = 'echo_task:Eco': echo_task has no Eco"),
        (("tasks.ham.sampling.max_tokens", "9999"), "tasks.ham.sampling.max_tokens = 9999 leaves no room"),
        (("task.type", "echo_task:Echo"), "there is [task] as well as [[tasks]]"),
    ],
)
def test_invalid_task_setting_error_names_its_table(project: Path, change: tuple[str, str], message: str):
    assert message in failure(SEVERAL, change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[tasks]]\ntype = "echo_task:Echo"\n' * 2, "two of [[tasks]] are named 'echo'"),
        ("[[tasks]]\nweight = 2\n", 'number 1 of [[tasks]] has neither type = "module:Class" nor a name'),
        ('[tasks.ham]\ntype = "echo_task:Echo"\n', "tasks must be tables, each under a line [[tasks]]"),
        ('[[tasks]]\ntype = "named_task:Named"\n', "the class has a field 'weight', which is a setting of all"),
        ("", "Several tasks are tables [[tasks]]"),
    ],
)
def test_ambiguous_task_tables_are_rejected(project: Path, text: str, message: str):
    Path("named_task.py").write_text("from echo_task import Echo\nclass Named(Echo):\n    weight: int = 3\n")
    assert message in failure(text)


def test_single_task_can_have_a_field_named_like_a_setting(project: Path):
    Path("named_task.py").write_text("from echo_task import Echo\nclass Named(Echo):\n    weight: int = 3\n")
    config = load('[task]\ntype = "named_task:Named"\nweight = 7\n')
    assert settings_of(config)["tasks.named.weight"] == 7
    assert "weight = 7" in dump_config(config)


def test_resume_can_change_only_the_weights_of_tasks(project: Path):
    made_with = settings_of(load(SEVERAL))

    def resume(*overrides: tuple[str, str]) -> None:
        allowed = [override for override in overrides if is_resumable(override[0])]
        check_options(load(SEVERAL, *overrides), load(SEVERAL, *allowed))
        check_unchanged(load(SEVERAL, *overrides), made_with, source=Path("config.toml"))

    resume(("tasks.ham.weight", "9"))
    with pytest.raises(ConfigError, match=r"teachers and weights of tasks can\); leave it out"):
        resume(("tasks.ham.words", '["spam"]'))
    for change in [("tasks.ham.words", '["spam"]'), ("tasks.third.type", "echo_task:Echo")]:
        with pytest.raises(ConfigError, match="and this run was made with"):
            check_unchanged(load(SEVERAL, change), made_with, source=Path("config.toml"))
    one = load('[task]\ntype = "echo_task:Echo"\n')
    with pytest.raises(ConfigError, match=r"task\.length is 3, and"):
        check_unchanged(one, settings_of(one) | {"tasks.echo.length": 4}, source=Path("config.toml"))


@pytest.mark.parametrize(
    ("class_name", "name"), [("AlphabetSort", "alphabet_sort"), ("GSM8K", "gsm8k"), ("QATask", "qa_task")]
)
def test_default_task_name_is_derived_from_its_class(class_name: str, name: str):
    assert name_of(class_name) == name


SUITES = """
[validation]
num_prompts = 6
interval = 4

[[validation.suites]]
task = "ham"
num_prompts = 2
temperature = 0
samples_per_prompt = 1

[[validation.suites]]
name = "unseen"
type = "echo_task:Echo"
words = ["spam"]
interval = 8
rollout = {max_turns = 2}
"""


def test_each_task_is_a_validation_suite_by_default(project: Path):
    suites = load(SEVERAL).suites
    assert [(suite.name, suite.num_prompts, suite.prefix) for suite in suites] == [
        ("ham", 64, "validation/ham"),
        ("echo", 64, "validation/echo"),
    ]
    (alone,) = load('[task]\ntype = "echo_task:Echo"\n').suites
    assert (alone.name, alone.prefix) == ("echo", "validation")
    assert load(SEVERAL, ("validation.num_prompts", "0")).suites == []


def test_suite_uses_a_task_of_the_run_or_its_own_task(project: Path):
    config = load(SEVERAL + SUITES)
    ham, unseen = config.suites
    assert ham.source is config.tasks[0]
    assert (ham.num_prompts, ham.samples_per_prompt, ham.temperature, ham.interval) == (2, 1, 0.0, 4)
    assert (unseen.num_prompts, unseen.samples_per_prompt, unseen.temperature, unseen.interval) == (6, 4, 1.0, 8)
    assert words(unseen.source) == "spam"
    assert config.limits_of(unseen.source).max_turns == 2
    assert [source.name for source in config.sources] == ["ham", "echo", "unseen"]
    Path("again.toml").write_text(dump_config(config))
    assert load_config("again.toml", check_files=False) == config
    overridden = load(SEVERAL + SUITES, ("validation.suites.unseen.num_prompts", "9"))
    assert overridden.suites[1].num_prompts == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("validation.suites.ham.task", "hum"),
            "validation.suites.ham.task = 'hum' is not one of the run's tasks, ham, echo",
        ),
        (
            ("validation.suites.unseen.num_promts", "2"),
            "validation.suites.unseen.num_promts = 2 is not a setting; nearest",
        ),
        (("validation.suites.unseen.lenght", "2"), "nearest: validation.suites.unseen.length"),
        (("validation.suites.unseen.name", '"ham"'), "2 of [[validation.suites]] have name = 'ham'"),
        (("validation.suites.unseen.name", '"echo"'), "with the name of a task of the run"),
        (("validation.suites.ham.samples_per_prompt", "4"), "validation.suites.ham.temperature = 0 is greedy"),
        (("validation.suites.unseen.type", "echo_task:Eco"), "validation.suites.unseen.type = 'echo_task:Eco': "),
        (("validation.suites", "3"), "validation.suites = 3 must be tables"),
        (("validation.suites.new.num_prompts", "3"), "validation.suites.new.task is missing"),
    ],
)
def test_invalid_suite_setting_error_names_its_table(project: Path, change: tuple[str, str], message: str):
    assert message in failure(SEVERAL + SUITES, change)


CURRICULUM = '\n[[tasks]]\ntype = "echo_task:Echo"\ncurriculum = {type = "by_difficulty", samples = 9}\n'


def test_curriculum_is_built_in_or_user_defined(project: Path):
    Path("own_curriculum.py").write_text(
        "from titan_rl.scheduling.curriculum import InOrder\nclass Own(InOrder):\n    step: int = 2\n"
    )
    config = load(CURRICULUM)
    assert config.tasks[0].curriculum == ByDifficulty(samples=9)
    own = load(CURRICULUM.replace("by_difficulty", "own_curriculum:Own").replace("samples", "step"))
    assert own.tasks[0].curriculum.step == 9  # pyright: ignore
    for each in (config, own):
        Path("again.toml").write_text(dump_config(each))
        assert load_config("again.toml", check_files=False) == each


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tasks.echo.curriculum.type", "by_dificulty"), "one of in_order, by_difficulty, stages, or a string"),
        (("tasks.echo.curriculum.type", "echo_task:Echo"), "Echo is not a curriculum: it lacks begin, finished, given"),
        (("tasks.echo.curriculum.sampels", "3"), "nearest: tasks.echo.curriculum.samples"),
        (("tasks.echo.curriculum.too_hard", "2"), "too_hard = 2 must be less than too_easy = 1"),
    ],
)
def test_invalid_curriculum_error_names_its_table(project: Path, change: tuple[str, str], message: str):
    assert message in failure(CURRICULUM, change)
