"""Settings of agents: the table [task] of an `AgentTask`, its templates, and the check of its command."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import FilePath, Section

_PART = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}|[{}]")


def fields_of(sample: Any, *, file: Path, started_in: Path) -> dict[str, Any]:
    """Fields for the templates of a rollout.

    Args:
        sample: Sample as plain JSON.
        file: File with the sample.
        started_in: Current folder at the start of the run.
    """
    own = dict(cast("Mapping[str, Any]", sample)) if isinstance(sample, Mapping) else {}
    return {**own, "python": sys.executable, "cwd": str(started_in), "sample": str(file)}


def filled_in(text: str, fields: Mapping[str, Any]) -> str:
    """Fill in a template. `{name}` becomes the field of that name, unchanged if it is text and otherwise as JSON; `{{`
    and `}}` become braces.

    Raises:
        ValueError: there is no field of a name, or a brace stands alone.
    """

    def part(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        name = match[1]
        if name is None:
            raise ValueError(f"{text!r} has a single brace; write {{{{ or }}}} for a brace")
        if name not in fields:
            raise ValueError(f"{text!r} names {name!r}; the sample has {', '.join(map(str, fields))}")
        value = fields[name]
        return value if isinstance(value, str) else json.dumps(value)

    return _PART.sub(part, text)


def split_command(text: str) -> str:
    """Split a command line into a list of words in the notation of TOML."""
    try:
        words = shlex.split(text)
    except ValueError:  # an unclosed quotation
        words = text.split()
    return json.dumps(words, ensure_ascii=False)


def check_command(command: Sequence[str], environment: Mapping[str, str], fields: Mapping[str, Any]) -> None:
    """Check that a command can be started.

    Args:
        command: Templates of the program and its arguments.
        environment: Templates of environment variables.
        fields: Fields of a sample.

    Raises:
        ConfigError: the program is not found, or a template names a field that the sample lacks.
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
        raise ConfigError(f"{begins}, but each program starts in its own folder; write {'{cwd}/' + here!r}")
    if not program.strip():
        raise ConfigError(f"{begins}; name a program, or leave the setting out to use external harnesses")
    if len(program.split()) > 1:
        raise ConfigError(
            f"{begins}, which is not a program; each word must be an item: {split_command(' '.join(command))}"
        )
    raise ConfigError(f"{begins}, which is not an executable program: neither a file nor in PATH")


def _filled_in(setting: str, text: str, fields: Mapping[str, Any]) -> str:
    try:
        return filled_in(text, fields)
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from None


class AgentSettings(Section):
    """Agent that plays rollouts, with its samples and rewards."""

    command: tuple[str, ...] = ()
    """Program and its arguments, which no shell reads. {name} is a field of the sample, {sample} the path of a file
    with the sample, {python} this Python, {cwd} the folder where the run began. Without a command, external harnesses
    open episodes over HTTP."""
    environment: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Environment variables of the program, added to those of the run and the episode; with fields as in command."""
    train_file: FilePath = ""
    """File with the training samples: rows in JSON lines, JSON, CSV or Parquet."""
    validation_file: FilePath = ""
    """File with the held-out samples."""
    rewards: Mapping[str, float] = Field(default_factory=lambda: {"reward": 1.0}, min_length=1)
    """Names of the rewards that agents report, and their weights."""
    host: str = "127.0.0.1"
    """Address on which the server listens."""
    port: int = Field(default=0, ge=0, lt=65536)
    """Port of the server; 0 takes a free one."""
    output_bytes: PositiveInt = 1 << 20
    """Most bytes that are kept of a program's output, in addition to its end."""
    keep: Literal["failed", "all", "none"] = "failed"
    """Rollouts whose folders are kept, in the folder agents/ of the run."""
    end_s: NonNegativeFloat = 5.0
    """Time for a program to end when its episode is over."""
    harness_wait_s: PositiveFloat = 600.0
    """Longest wait of a sample for a harness, which does not count as time of its rollout."""

    @field_validator("command", mode="before")
    @classmethod
    def _is_list(cls, command: object) -> object:
        if isinstance(command, str):
            raise ValueError(f"{command!r} must be a list of words: {split_command(command)}")
        return tuple(cast("list[object]", command)) if isinstance(command, list) else command

    @field_validator("train_file", "validation_file")
    @classmethod
    def _is_file(cls, path: str) -> str:
        if path and not Path(path).is_file():
            raise ValueError(f"there is no file {path!r}; name a file of JSON objects, one in each line")
        return path
