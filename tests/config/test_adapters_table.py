"""The tables [[adapters]]: settings of each adapter, and incompatible settings."""

from __future__ import annotations

from pathlib import Path

import pytest

import titan_rl
from titan_rl.config.load import dump_config, given_config, load_config
from titan_rl.config.resume_changes import check_options, check_unchanged, settings_of
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import ConfigError

TOML = """
[model]
path = "base"

[training]
steps = 7
clip = [0.1, 0.1]
adapter.rank = 2
adapter.alpha = 8

[[tasks]]
name = "short"
type = "examples.alphabet_sort.task:AlphabetSort"

[[tasks]]
name = "long"
type = "examples.alphabet_sort.task:AlphabetSort"

[[adapters]]
name = "plain"
tasks = ["short", "long"]

[[adapters]]
name = "other"
tasks = ["long"]
training = { algorithm = "gspo", steps = 3, adapter.rank = 4 }
"""


def load(folder: Path, text: str = TOML, **settings: str) -> RunConfig:
    (file := folder / "run.toml").write_text(text)
    overrides = [(key.replace("__", "."), value) for key, value in settings.items()]
    return load_config(file, overrides, check_files=False)


def test_adapter_inherits_and_overrides_run_settings(tmp_path: Path) -> None:
    config = load(tmp_path, adapters__other__training__lr="2e-3")
    plain, other = config.experiments.values()
    assert (plain.training.steps, plain.training.loss, plain.training.clip) == (7, "grpo", (0.1, 0.1))
    assert (other.training.steps, other.training.loss, other.training.clip) == (3, "gspo", (0.1, 0.1))
    assert (plain.training.adapter.rank, other.training.adapter.rank, other.training.adapter.alpha) == (2, 4, 8.0)
    assert (plain.training.peak_lr, other.training.peak_lr) == (plain.training.default_lr, 2e-3)
    assert [source.name for source in plain.tasks] == ["short", "long"]
    assert [source.name for source in other.tasks] == ["long"]
    assert [suite.name for suite in other.suites] == ["long"]
    assert not other.adapters


def test_adapters_have_separate_task_objects(tmp_path: Path) -> None:
    plain, other = load(tmp_path).experiments.values()
    assert plain.tasks[1] == other.tasks[0]
    assert plain.tasks[1].task is not other.tasks[0].task


def test_dumped_config_has_the_same_experiments(tmp_path: Path) -> None:
    config = load(tmp_path)
    again = load(tmp_path, dump_config(config))
    assert again == config
    assert again.experiments == config.experiments


def test_resume_can_change_an_adapters_steps_but_not_its_rank(tmp_path: Path) -> None:
    made_with = settings_of(load(tmp_path))
    dumped = dump_config(load(tmp_path))
    check_unchanged(load(tmp_path, dumped, adapters__other__training__steps="9"), made_with, source=tmp_path)
    changed = load(tmp_path, dumped, adapters__other__training__adapter__rank="8")
    with pytest.raises(ConfigError, match=r"adapters.other.training.adapter.rank is 8"):
        check_unchanged(changed, made_with, source=tmp_path)


def test_several_adapters_can_be_trained_without_validation(tmp_path: Path) -> None:
    config = load(tmp_path, validation__num_prompts="0", generation__adapter_swap="pinned")
    for name, experiment in config.experiments.items():
        assert not experiment.suites
        assert not experiment.validates_beside_training
        (folder := tmp_path / name).mkdir()
        assert load(folder, dump_config(experiment)).training == experiment.training, (
            "the config in the folder of an experiment is valid"
        )


def test_problem_shared_by_all_adapters_is_reported_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, validation__num_prompts="0", validation__samples_per_prompt="2")
    assert str(caught.value).count("validation.samples_per_prompt = 2 has no effect") == 1
    assert "adapters." not in str(caught.value)


def test_resume_compares_an_adapter_option_with_the_inherited_value(tmp_path: Path) -> None:
    dumped = dump_config(load(tmp_path))
    rank = load(tmp_path).experiments["plain"].training.adapter.rank
    same = load(tmp_path, dumped, adapters__plain__training__adapter__rank=str(rank))
    check_options(same, load(tmp_path, dumped))
    changed = load(tmp_path, dumped, adapters__plain__training__adapter__rank="7")
    with pytest.raises(ConfigError, match=rf"adapters.plain.training.adapter.rank is 7, and the run has {rank}: these"):
        check_options(changed, load(tmp_path, dumped))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"training__adapter__rank": "0"}, r"adapters.plain.training.adapter.rank = 0: each of \[\[adapters\]\]"),
        ({"training__data_parallel": "2"}, "with 2 trainer processes: adapters share the weights"),
        ({"scheduling__on_batch_ready": "keep"}, "a step of one adapter would stop the others"),
        ({"generation__pull_mode": "drain"}, "a version of one adapter would hold up"),
        ({"rollout__num_workers": "1"}, "their rollouts run in the controller's process; set it to 0"),
        ({"adapters__plain__tasks": '["long"]'}, r"task 'short' belongs to no adapter"),
        ({"adapters__other__tasks": '["lnog"]'}, "adapters.other.tasks has 'lnog'; the run has the tasks short, long"),
        ({"adapters__other__tasks": '["long", "long"]'}, "adapters.other.tasks names 'long' twice"),
        ({"adapters__other__training__critic": "head"}, r"critics are not supported with \[\[adapters\]\]"),
        (
            {"adapters__other__training__stepz": "3"},
            "adapters.other.training.stepz = 3 is not a setting; nearest: adapters.other.training.steps$",
        ),
        (
            {"adapters__other__training__learning_rate": "3e-4"},
            "learning_rate = 0.0003 is not a setting; nearest: adapters.other.training.lr$",
        ),
        (
            {"adapters__other__training__beta": "0.1"},
            "adapters.other.training.beta = 0.1 is not a setting; nearest: adapters.other.training.kl_coef$",
        ),
        ({"adapters__other__training__steps": "0"}, "adapters.other.training.steps = 0 must be greater than 0$"),
        (
            {"adapters__other__training__clip": "0.2"},
            r"other.training.clip = 0.2 must be a list; in brackets: \[0.2\]",
        ),
        (
            {"adapters__other__training__adapter__rank": "a"},
            "adapters.other.training.adapter.rank = 'a' must be a valid integer$",
        ),
        (
            {"adapters__other__lr": "1e-3"},
            "command line: adapters.other.lr = 0.001 is not a setting; nearest: adapters.other.training.lr$",
        ),
        (
            {"adapters__other__rank": "4"},
            "command line: adapters.other.rank = 4 is not a setting; nearest: adapters.other.training.adapter.rank$",
        ),
        (
            {"adapters__other__generation__adapter_swap": "pinned"},
            r"other.generation: only settings of \[training\] may differ between adapters; set generation",
        ),
        ({"adapters__other__seed": "3"}, "adapters.other.seed: only settings of"),
        (
            {"adapters__other__tasks": "long"},
            r"other.tasks = 'long' must be a list; in brackets: \[\"long\"\]$",
        ),
        ({"adapters__other__tasks": "[]"}, r"adapters.other.tasks = \[\] is empty$"),
        ({"adapters__other__training": "3"}, "adapters.other.training = 3 must be a table"),
        (
            {"adapters__otter__training__lr": "1e-3", "adapters__otter__training__steps": "2"},
            "command line: adapters.otter.training.lr, adapters.otter.training.steps: there is no adapter 'otter'; "
            "nearest: adapters.other; the adapters of the run are plain, other$",
        ),
        ({"adapters__a/b__tasks": '["long"]'}, "adapters.a/b.name = 'a/b' must be letters, digits, - and _, 1 to 100$"),
        ({"adapters": "3"}, r"adapters = 3 must be tables, each under \[\[adapters\]\]$"),
        (
            {"adapters__other__training__loss": "os:no_loss"},
            "command line: adapters.other.training.loss = 'os:no_loss'",
        ),
        ({"adapters__other__training__kl": "k2"}, 'adapters.other: training.kl = "k2" has no effect'),
    ],
)
def test_settings_incompatible_with_several_adapters_are_rejected(
    tmp_path: Path, settings: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, **settings)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('tasks = ["long"]', r"number 3 of \[\[adapters\]\] has no name; give it a name = \"...\"$"),
        ('name = "new"', "run.toml: adapters.new.tasks is missing$"),
        ('name = "plain"', r"two of \[\[adapters\]\] are named 'plain'; give one of them another name"),
        (f'name = "{"n" * 101}"\ntasks = ["long"]', "must be letters, digits, - and _, 1 to 100$"),
    ],
)
def test_invalid_adapter_table_is_rejected(tmp_path: Path, table: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, f"{TOML}\n[[adapters]]\n{table}\n")


def test_pythonpath_includes_the_loss_module_of_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "loss_of_one.py").write_text("def loss(tokens, clip): ...")
    config = load(tmp_path, adapters__other__training__loss="loss_of_one:loss")
    assert str(tmp_path) in config.pythonpath


def test_python_overrides_change_adapter_settings(tmp_path: Path) -> None:
    changes = {"adapters.other.training.lr": 2e-3, "adapters.plain.training": {"steps": 5}}
    config = given_config(load(tmp_path), functions={}, overrides=changes, check_files=False)
    plain, other = config.experiments.values()
    assert (plain.training.steps, other.training.peak_lr, other.training.adapter.rank) == (5, 2e-3, 4)
    with pytest.raises(ConfigError, match=r"arguments: adapters.new.training.lr: there is no adapter 'new'; the"):
        given_config(config, functions={}, overrides={"adapters.new.training.lr": 1e-3}, check_files=False)


def test_engines_hold_all_adapters_and_have_slots_for_all_experiments(tmp_path: Path) -> None:
    pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
    from titan_rl.cluster.generator_actor import adapter_specs
    from titan_rl.config.concurrency import Concurrency, engine_max_running

    config = load(tmp_path)
    assert {name: (spec.rank, spec.scale) for name, spec in adapter_specs(config).items()} == {
        "plain": (2, 4.0),
        "other": (4, 2.0),
    }
    assert engine_max_running(config) == 2 * Concurrency.of(config).wanted


def test_train_rejects_custom_parts_with_several_adapters(tmp_path: Path) -> None:
    config = load(tmp_path)
    with pytest.raises(
        ConfigError, match=r"trainer, replicas with \[\[adapters\]\]: parts can be given to a run with a"
    ):
        titan_rl.train(config, trainer=object(), generate=print)  # pyright: ignore[reportArgumentType]
