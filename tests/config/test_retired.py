"""Settings of earlier versions: refused with what to write instead, and ignored where they change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from user_project import project

from titan_rl.config.load import load_config
from titan_rl.config.retired import RETIRED, drop_unchanged
from titan_rl.config.run import RunConfig
from titan_rl.config.serve import load_serve_config
from titan_rl.config.settings_reference import tables
from titan_rl.config.validation_errors import settings
from titan_rl.core.errors import ConfigError

__all__ = ["project"]

OTHER = "quux"
OF_A_RUN = [key for key in RETIRED if "*" not in key and not key.startswith("server.")]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("key", OF_A_RUN)
def test_a_retired_setting_is_refused_with_what_to_write_instead(key: str, project: Path):
    Path("more.toml").write_text(tomli_w.dumps(nested(key, OTHER)))

    with pytest.raises(ConfigError) as refused:
        load_config(["config.toml", "more.toml"])

    assert f"more.toml: {key} = '{OTHER}' is not a setting; {RETIRED[key].advice}" in str(refused.value)


@pytest.mark.parametrize("key", [key for key in OF_A_RUN if RETIRED[key].default is not None])
def test_a_retired_setting_with_its_last_default_is_ignored(key: str, project: Path):
    Path("more.toml").write_text(tomli_w.dumps(nested(key, RETIRED[key].default)))

    assert load_config(["config.toml", "more.toml"]) == load_config("config.toml")


def test_a_retired_setting_of_a_task_is_found_by_any_name():
    given: dict[str, Any] = {"tasks": {"sums": {"rollout": {"x": 1, "max_turns": 2}}, "odd": 3}}
    drop_unchanged(given)
    assert given == {"tasks": {"sums": {"rollout": {"x": 1, "max_turns": 2}}, "odd": 3}}


def test_nothing_that_is_retired_is_a_setting():
    assert not {*settings(RunConfig), *(entry.key for table in tables() for entry in table.settings)} & RETIRED.keys()


def test_there_are_not_more_settings_than_there_were():
    assert len([entry for table in tables() for entry in table.settings]) <= 203


def test_a_server_refuses_retired_settings_too(project: Path):
    with pytest.raises(ConfigError, match=r"generation.max_respawns = 9 is not a setting; set hosts.max_respawns"):
        load_serve_config(Path("config.toml"), [("generation.max_respawns", "9")], policy=None)
