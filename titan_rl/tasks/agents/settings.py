"""The settings of agents: the table [task] of an `AgentTask`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from titan_rl.core.settings import Section
from titan_rl.tasks.agents.command import split_command


class AgentSettings(Section):
    """What plays rollouts, on which samples, and for which rewards."""

    command: tuple[str, ...] = ()
    """The program and its arguments, which no shell reads. {name} is a field of the sample, {sample} the file that it
    is in, {python} this Python, {cwd} the folder where the run began. Without a command, harnesses that run elsewhere
    open episodes by HTTP."""
    environment: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Variables of the program's environment beside the run's own and its episode's; fields as in command."""
    train_file: str = ""
    """Samples to train on: JSON objects, one a line."""
    validation_file: str = ""
    """Held-out samples."""
    rewards: Mapping[str, float] = Field(default_factory=lambda: {"reward": 1.0}, min_length=1)
    """Names of the rewards that agents report, and their weights."""
    host: str = "127.0.0.1"
    """Where the server listens."""
    port: int = Field(default=0, ge=0, lt=65536)
    """0 takes one that is free."""
    output_bytes: PositiveInt = 1 << 20
    """Most that is kept of what a program prints, and its end beside that."""
    keep: Literal["failed", "all", "none"] = "failed"
    """Whose folders stay in the run's folder, under agents/."""
    end_s: NonNegativeFloat = 5.0
    """What a program has to end when its episode is over."""
    harness_wait_s: PositiveFloat = 600.0
    """How long a sample waits for a harness; no time of its rollout."""

    @field_validator("command", mode="before")
    @classmethod
    def _is_list(cls, command: object) -> object:
        if isinstance(command, str):
            raise ValueError(f"{command!r} must be a list of words: {split_command(command)}")
        return tuple(cast("list[object]", command)) if isinstance(command, list) else command

    @field_validator("train_file", "validation_file")
    @classmethod
    def _is_there(cls, path: str) -> str:
        if path and not Path(path).is_file():
            raise ValueError(f"there is no file {path!r}; name one of JSON objects, one a line")
        return path
