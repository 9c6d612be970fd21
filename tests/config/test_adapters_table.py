"""[[adapters]]: the settings of each, and what they exclude."""

from __future__ import annotations

from pathlib import Path

import pytest

import titan_rl
from titan_rl.config.changes import check_unchanged, settings_of
from titan_rl.config.load import dump_config, load_config
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


def test_an_adapter_has_the_settings_of_the_run_and_its_own(tmp_path: Path) -> None:
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


def test_what_one_adapter_opens_in_a_task_is_not_that_of_another(tmp_path: Path) -> None:
    plain, other = load(tmp_path).experiments.values()
    assert plain.tasks[1] == other.tasks[0]
    assert plain.tasks[1].task is not other.tasks[0].task


def test_a_dumped_config_has_the_same_experiments(tmp_path: Path) -> None:
    config = load(tmp_path)
    again = load(tmp_path, dump_config(config))
    assert again == config
    assert again.experiments == config.experiments


def test_a_resumed_run_may_change_the_steps_of_an_adapter_and_not_its_rank(tmp_path: Path) -> None:
    made_with = settings_of(load(tmp_path))
    dumped = dump_config(load(tmp_path))
    check_unchanged(load(tmp_path, dumped, adapters__other__training__steps="9"), made_with, source=tmp_path)
    changed = load(tmp_path, dumped, adapters__other__training__adapter__rank="8")
    with pytest.raises(ConfigError, match=r"adapters.other.training.adapter.rank is 8"):
        check_unchanged(changed, made_with, source=tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"training__adapter__rank": "0"}, r"adapters.plain.training.adapter.rank = 0: each of \[\[adapters\]\]"),
        ({"training__data_parallel": "2"}, "with 2 trainer processes: adapters share the weights"),
        ({"scheduling__on_batch_ready": "keep"}, "a step of one adapter would stop the others"),
        ({"generation__pull_mode": "drain"}, "a version of one adapter would hold up"),
        ({"rollout__num_workers": "1"}, "their rollouts run in the controller's process; set it to 0"),
        ({"adapters__plain__tasks": '["long"]'}, r"task 'short' belongs to none of \[\[adapters\]\]"),
        ({"adapters__other__tasks": '["lnog"]'}, "adapters.other.tasks has 'lnog'; the run has the tasks short, long"),
        ({"adapters__other__tasks": '["long", "long"]'}, "adapters.other.tasks names 'long' twice"),
        ({"adapters__other__training__critic": "head"}, r"critics are not supported with \[\[adapters\]\]"),
        ({"adapters__other__training__stepz": "3"}, "adapters.other.training.stepz = 3 is not a setting"),
        ({"adapters__other__training__steps": "0"}, "adapters.other.training.steps = 0: .*greater than 0"),
        ({"adapters__other__training__kl": "k2"}, 'adapters.other: training.kl = "k2" has no effect'),
    ],
)
def test_settings_that_do_not_fit_several_adapters_are_refused(
    tmp_path: Path, settings: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, **settings)


def test_engines_hold_all_adapters_and_have_places_for_all_experiments(tmp_path: Path) -> None:
    pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
    from titan_rl.cluster.generator_actor import adapter_specs
    from titan_rl.config.concurrency import Concurrency, engine_places

    config = load(tmp_path)
    assert {name: (spec.rank, spec.scale) for name, spec in adapter_specs(config).items()} == {
        "plain": (2, 4.0),
        "other": (4, 2.0),
    }
    assert engine_places(config) == 2 * Concurrency.of(config).wanted


def test_parts_for_one_policy_are_refused_for_several_before_anything_is_started(tmp_path: Path) -> None:
    config = load(tmp_path)
    with pytest.raises(
        ConfigError, match=r"trainer, replicas with \[\[adapters\]\]: parts can be given to a run with a"
    ):
        titan_rl.train(config, trainer=object(), generate=print)  # pyright: ignore[reportArgumentType]
