"""Settings given on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import islice

from titan_rl.config.changes import RESUMABLE
from titan_rl.errors import ConfigError


def check_resume(overrides: Sequence[tuple[str, str]]) -> None:
    """A run that goes on may be longer or run elsewhere. It may not change what its weights and rollouts come from.

    Raises:
        ConfigError: names the settings.
    """
    wrong = [key for key, _ in overrides if not key.startswith(RESUMABLE)]
    if wrong:
        allowed = ", ".join(name + "*" if name.endswith(".") else name for name in RESUMABLE)
        raise ConfigError(f"--{wrong[0]} cannot change when a run is resumed; {allowed} can")


def split_overrides(
    argv: Sequence[str], flags: Sequence[str], options: Sequence[str] = ()
) -> tuple[list[str], list[tuple[str, str]]]:
    """Take the settings out of the arguments; every option that is not one of `flags` is a setting.

    Args:
        options: other arguments that are followed by a value.

    Returns:
        the other arguments, and the settings in their order.

    Raises:
        ConfigError: a setting has no value.

    Example:
        split_overrides(["a.toml", "--training.lr", "1e-3", "--seed=3", "--dry-run"], ["--dry-run"])
        # (["a.toml", "--dry-run"], [("training.lr", "1e-3"), ("seed", "3")])
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith("--") or argument in flags:
            rest.append(argument)
            continue
        if argument.partition("=")[0] in options:
            rest += [argument] if "=" in argument else [argument, *islice(arguments, 1)]
            continue
        key, equals, value = argument.removeprefix("--").partition("=")
        if not equals:
            # A value may begin with one dash, as negative numbers do, and after `=` with anything.
            following = next(arguments, None)
            if following is None or following.startswith("--"):
                close = difflib.get_close_matches(argument, flags, n=1)
                raise ConfigError(f"{argument} needs a value{f'; or was {close[0]} meant?' if close else ''}")
            value = following
        if not all(key.split(".")):
            raise ConfigError(f"{argument} is not a setting; it must look like --table.setting value")
        overrides.append((key, value))
    return rest, overrides
