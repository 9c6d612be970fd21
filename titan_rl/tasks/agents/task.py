"""`AgentTask`, whose rollouts are played by agents: programs started for each rollout, or external harnesses."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from titan_rl.core.calls.plain import plain_json
from titan_rl.core.errors import ConfigError
from titan_rl.rollout.environment.types import AgentEnv
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.reward import env_reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.task import RunContext
from titan_rl.tasks.agents.host import SAMPLE, AgentHost, AgentRollout, hosting
from titan_rl.tasks.agents.settings import AgentSettings, check_command, fields_of
from titan_rl.tasks.rows import read_json_lines


class AgentTask(AgentSettings):
    """Task whose rollouts are episodes of an agent. The agent queries the policy over HTTP, in the protocol of OpenAI
    or Anthropic, and reports its rewards.

    Override `train_sample` and `validation_samples` for other data, and `rubric` to judge agents by the messages of
    their rollouts.
    """

    _host: AgentHost | None = PrivateAttr(None)
    _files: dict[str, list[Any]] = PrivateAttr(default_factory=dict)  # rows by path, each read once

    def train_sample(self, seed: int, index: int) -> Any:
        rows = self._rows(self.train_file, "train_file")
        epoch, at = divmod(index, len(rows))
        return rows[_order(len(rows), seed, epoch)[at]]

    def validation_samples(self, count: int) -> Sequence[Any]:
        return self._rows(self.validation_file, "validation_file")[:count] if count else []

    def make_env(self, sample: Any, renderer: Renderer) -> AgentEnv:
        if self._host is None:
            raise RuntimeError("an AgentTask makes environments only while it is open")
        return AgentRollout(self._host, sample)

    def rubric(self) -> Rubric:
        return Rubric([env_reward(name, weight) for name, weight in self.rewards.items()])

    def check_settings(self) -> None:
        """Read the first samples, and look up the command.

        Raises:
            ConfigError: a file has no samples, or the command cannot be started for the first sample.
        """
        sample = self.train_sample(0, 0)
        if self.validation_file:
            self.validation_samples(1)
        if self.command:
            fields = fields_of(plain_json(sample), file=Path(SAMPLE), started_in=Path.cwd())
            check_command(self.command, self.environment, fields)

    @asynccontextmanager
    async def open(self, run: RunContext) -> AsyncGenerator[None]:
        """Context in which the policy is served to agents."""
        async with hosting(self, run) as self._host:
            try:
                yield
            finally:
                self._host = None

    def _rows(self, path: str, setting: str) -> list[Any]:
        if not path:
            raise ConfigError(f"task.{setting} is not set; name a file of JSON objects, one in each line")
        if path not in self._files:
            try:
                self._files[path] = read_json_lines(path)
            except ConfigError as error:
                raise ConfigError(
                    f"task.{setting} = {path!r}: {error}; write JSON objects, one in each line"
                ) from error
        return self._files[path]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
