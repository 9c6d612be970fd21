from __future__ import annotations

import pytest

from titan_rl.cli.overrides import split_overrides
from titan_rl.errors import ConfigError

FLAGS = ["--dry-run", "--help"]


def test_settings_are_taken_out_and_the_rest_stays_in_order():
    rest, overrides = split_overrides(
        ["--training.lr", "1e-3", "a.toml", "--seed=3", "--dry-run", "--task.words=a=b", "--logging.x", "-1"], FLAGS
    )

    assert rest == ["a.toml", "--dry-run"]
    assert overrides == [("training.lr", "1e-3"), ("seed", "3"), ("task.words", "a=b"), ("logging.x", "-1")]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--training.lr"], "--training.lr needs a value"),
        (["--training.lr", "--seed=3"], "--training.lr needs a value"),
        (["--dryrun"], "or was --dry-run meant"),
        (["--training..lr=1"], "is not a setting"),
        (["--=1"], "is not a setting"),
    ],
)
def test_a_setting_without_name_or_value_is_refused(argv: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        split_overrides(argv, FLAGS)
