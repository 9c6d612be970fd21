"""The task of an agent that is a program of its own, or a harness that runs elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from pydantic import PrivateAttr

from titan_rl.agents.env import AgentRollout
from titan_rl.agents.host import AgentHost, hosting
from titan_rl.agents.settings import AgentSettings
from titan_rl.rollout.environment.types import AgentEnv
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.reward import env_reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.task import RunContext


class AgentTask(AgentSettings):
    """Each rollout is an episode that an agent plays: it asks the policy over HTTP, by OpenAI's or Anthropic's
    protocol, and reports what that was worth.

    Give a subclass `train_sample` and `validation_samples` for data of another kind, and `rubric` to judge what agents
    did by their rollouts' messages.
    """

    _host: AgentHost | None = PrivateAttr(None)

    def train_sample(self, seed: int, index: int) -> Any:
        rows = _rows(self.train_file, "train_file")
        epoch, at = divmod(index, len(rows))
        return rows[_order(len(rows), seed, epoch)[at]]

    def validation_samples(self, count: int) -> Sequence[Any]:
        return _rows(self.validation_file, "validation_file")[:count] if count else []

    def make_env(self, sample: Any, renderer: Renderer) -> AgentEnv:
        if self._host is None:
            raise RuntimeError("an AgentTask makes environments while it is open")
        return AgentRollout(self._host, sample)

    def rubric(self) -> Rubric:
        return Rubric([env_reward(name, weight) for name, weight in self.rewards.items()])

    @asynccontextmanager
    async def open(self, run: RunContext) -> AsyncGenerator[None]:
        """A server for agents, for the length of the block."""
        async with hosting(self, run) as self._host:
            try:
                yield
            finally:
                self._host = None


@lru_cache(maxsize=8)
def _rows(path: str, setting: str) -> list[Any]:
    if not path:
        raise ValueError(f"task.{setting} is not set; name a file of JSON objects, one a line")
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    if not rows:
        raise ValueError(f"task.{setting} = {path!r} has no lines")
    return rows


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
