"""`titan-rl settings`: the reference of all settings in the terminal."""

from __future__ import annotations

import pytest

from titan_rl.cli.main import main
from titan_rl.config.run import RunConfig
from titan_rl.config.settings_reference import tables
from titan_rl.config.validation_errors import settings


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["settings", *arguments]) == 0
    return capsys.readouterr().out


def test_lists_all_settings_with_type_default_and_meaning(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys)

    in_tables = {name.rpartition(".")[0] for name in settings(RunConfig)} | {"adapters", "tasks", "validation.suites"}
    assert not [name for name in settings(RunConfig) if name not in in_tables and f"\n  {name}: " not in text]
    assert "  training.steps: integer = 100\n      Optimizer steps of the run.\n" in text
    assert "  model.path: text (required)\n" in text
    assert '  scheduling.mode: "sync", "one_step_off", "streaming", "async"\n' in text
    assert "  server.port: integer = 8000\n" in text
    assert "  tasks.NAME.type: name (required)\n" in text
    assert all(setting.about for table in tables() for setting in table.settings)
    assert max(map(len, text.splitlines())) <= 200


def test_table_is_shown_with_its_subtables(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "[generation]")

    assert text.startswith("[generation]: ")
    assert "  generation.speculative.method: " in text
    assert "training." not in [line.strip().partition(".")[0] + "." for line in text.splitlines() if ": " in line]


def test_top_level_settings_are_shown_as_run(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "run")

    assert "  seed: integer = 0\n" in text
    assert "training.lr" not in text


def test_unknown_table_error_lists_the_tables(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["settings", "schedule"])

    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert "schedule" in err
    assert all(table.name in err for table in tables())
