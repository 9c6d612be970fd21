"""Whether the command of an agent can be started, as far as that is known before a run begins."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_rl.core.errors import ConfigError
from titan_rl.tasks.agents.template import filled_in


def split_command(text: str) -> str:
    """A command line as a list of words, as one writes it in TOML."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation that does not end
        words = text.split()
    return json.dumps(words, ensure_ascii=False)


def check_command(command: Sequence[str], environment: Mapping[str, str], fields: Mapping[str, Any]) -> None:
    """
    Args:
        fields: of a sample.

    Raises:
        ConfigError: the program is not found, or something is named that the sample does not have.
    """
    words = [_filled_in("task.command", part, fields) for part in command]
    variables = {name: _filled_in(f"task.environment.{name}", text, fields) for name, text in environment.items()}
    path = variables.get("PATH", os.environ.get("PATH"))
    program = words[0]
    is_found = shutil.which(program, path=path) is not None
    if is_found and (os.sep not in program or Path(program).is_absolute()):
        return
    begins = f"task.command begins with {command[0]!r}"
    if is_found:
        here = Path(program).as_posix()
        raise ConfigError(f"{begins}, but programs start in a folder of their own; write {'{cwd}/' + here!r}")
    if not program.strip():
        raise ConfigError(f"{begins}; name a program, or leave the setting out for harnesses that run elsewhere")
    if len(program.split()) > 1:
        raise ConfigError(f"{begins}, which is no program; each word is an item: {split_command(' '.join(command))}")
    raise ConfigError(f"{begins}, which is no program that can be run: neither a file nor in PATH")


def _filled_in(setting: str, text: str, fields: Mapping[str, Any]) -> str:
    try:
        return filled_in(text, fields)
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from None
