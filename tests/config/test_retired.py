"""Settings of earlier versions: rejected with their replacement, or ignored if they change nothing."""

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
RUN_SETTINGS = [key for key in RETIRED if "*" not in key and not key.startswith("server.")]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("key", RUN_SETTINGS)
def test_retired_setting_error_names_the_replacement(key: str, project: Path):
    Path("more.toml").write_text(tomli_w.dumps(nested(key, OTHER)))

    with pytest.raises(ConfigError) as raised:
        load_config(["config.toml", "more.toml"])

    assert f"more.toml: {key} = '{OTHER}' is not a setting; {RETIRED[key].advice}" in str(raised.value)


@pytest.mark.parametrize("key", [key for key in RUN_SETTINGS if RETIRED[key].default is not None])
def test_retired_setting_at_its_last_default_is_ignored(key: str, project: Path):
    Path("more.toml").write_text(tomli_w.dumps(nested(key, RETIRED[key].default)))

    assert load_config(["config.toml", "more.toml"]) == load_config("config.toml")


def test_dropping_retired_settings_keeps_task_settings():
    given: dict[str, Any] = {"tasks": {"sums": {"rollout": {"x": 1, "max_turns": 2}}, "odd": 3}}
    drop_unchanged(given)
    assert given == {"tasks": {"sums": {"rollout": {"x": 1, "max_turns": 2}}, "odd": 3}}


def test_no_retired_setting_is_still_a_setting():
    assert not {*settings(RunConfig), *(entry.key for table in tables() for entry in table.settings)} & RETIRED.keys()


def test_number_of_settings_does_not_grow():
    assert len([entry for table in tables() for entry in table.settings]) <= 203


def test_server_rejects_retired_settings(project: Path):
    with pytest.raises(ConfigError, match=r"generation.max_respawns = 9 is not a setting; set hosts.max_respawns"):
        load_serve_config(Path("config.toml"), [("generation.max_respawns", "9")], policy=None)
