"""scheduling.mode: a preset of settings, each of which can be overridden."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError
from user_project import project

from titan_rl.cli.main import main
from titan_rl.config.load import dump_config, given_config, load_config
from titan_rl.core.errors import ConfigError
from titan_rl.scheduling.settings import MODES, Mode, SchedulingConfig

__all__ = ["project"]

NAMES = ("max_staleness", "oversample", "max_group_age", "window")


def values(scheduling: SchedulingConfig) -> tuple[object, ...]:
    return tuple(getattr(scheduling, name) for name in NAMES)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 0.0, None, None)),
        ({"mode": "sync"}, (0, 0.0, None, None)),
        ({"mode": "one_step_off"}, (1, 0.0, None, None)),
        ({"mode": "streaming"}, (0, 0.5, None, None)),
        ({"mode": "async"}, (3, 1.0, 7, None)),
        ({"mode": "async", "max_staleness": 2}, (2, 1.0, 7, None)),
        ({"mode": "async", "max_group_age": None}, (3, 1.0, None, None)),
        ({"mode": "async", "window": 4}, (3, 1.0, None, 4)),
        ({"mode": "streaming", "oversample": 0.25}, (0, 0.25, None, None)),
        ({"mode": None}, (1, 0.0, None, None)),
    ],
)
def test_mode_sets_the_settings_that_are_not_given(given: Mapping[str, object], expected: tuple[object, ...]):
    scheduling = SchedulingConfig.model_validate(given)

    assert values(scheduling) == expected
    assert scheduling.model_fields_set == set(given)
    assert SchedulingConfig.model_validate(scheduling.model_dump()) == scheduling
    assert SchedulingConfig.model_validate(scheduling) is scheduling


@pytest.mark.parametrize("mode", MODES)
def test_mode_without_effect_is_an_error(mode: Mode):
    given = {"max_staleness": 9, "oversample": 0.125, "max_group_age": 11}

    with pytest.raises(ValidationError, match=rf'mode = "{mode}" has no effect.*max_staleness = 9.*leave mode out'):
        SchedulingConfig.model_validate({"mode": mode, **given})


def test_conflict_with_a_mode_value_names_the_mode():
    with pytest.raises(ValidationError, match=r'max_group_age = 7 \(set by mode = "async"\) is less than 10'):
        SchedulingConfig(mode="async", max_staleness=9)


def test_unknown_mode_error_lists_the_modes(project: Path):
    with pytest.raises(ConfigError, match=r"scheduling.mode = 'asynk' must be 'sync', 'one_step_off', 'streaming' or"):
        load_config("config.toml", [("scheduling.mode", "asynk")])


OVERRIDES = [
    [("mode", "sync")],
    [("mode", "async"), ("max_staleness", "1")],
    [("mode", "async"), ("max_group_age", "none")],
    [("mode", "async"), ("window", "5")],
    [("mode", "streaming"), ("oversample", "0.0")],
]


@pytest.mark.parametrize("with_defaults", [True, False])
@pytest.mark.parametrize("overrides", OVERRIDES)
def test_dumped_config_contains_the_mode_settings_and_round_trips(
    overrides: list[tuple[str, str]], with_defaults: bool, project: Path
):
    config = load_config("config.toml", [(f"scheduling.{name}", value) for name, value in overrides])

    text = dump_config(config, with_defaults=with_defaults)

    Path("dumped.toml").write_text(text)
    assert load_config("dumped.toml") == config
    given = dict(overrides)
    replaced = {"max_group_age"} if "window" in given else set[str]()
    assert {"mode", *MODES[given["mode"]]} - replaced <= tomllib.loads(text)["scheduling"].keys()
    again = dump_config(load_config("dumped.toml"), with_defaults=with_defaults)
    assert tomllib.loads(again) == tomllib.loads(text)


def test_dry_run_shows_mode_values_and_given_values(project: Path, capfd: pytest.CaptureFixture[str]):
    main(["train", "config.toml", "--scheduling.mode", "async", "--scheduling.max_staleness", "2", "--dry-run"])

    shown = capfd.readouterr().out
    assert '# scheduling.mode = "async" sets oversample = 1.0 and max_group_age = 7; given: max_staleness = 2' in shown
    assert {'mode = "async"', "max_staleness = 2", "oversample = 1.0", "max_group_age = 7"} <= set(shown.splitlines())


def test_mode_from_python_replaces_the_mode_of_the_config(project: Path):
    config = load_config("config.toml", [("scheduling.mode", "sync")])

    changed = given_config(config, functions={}, overrides={"scheduling": {"mode": "async"}}, check_files=False)

    assert values(changed.scheduling) == (3, 1.0, 7, None)
    assert config.seeds_requests
    assert not changed.seeds_requests
