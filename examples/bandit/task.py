"""Contextual bandit in tokens: no text, no renderer, and an untrained model.

In each round the prompt ends with a token, the state of a row of one-armed bandits, and the completion is a token that
selects the arm to pull. The arm that pays most often depends on the state.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

from titan_rl import (
    ChatTemplateRenderer,
    Completion,
    Renderer,
    RolloutStatus,
    Rubric,
    TokenEnv,
    TokenObservation,
    TokenStep,
    env_reward,
)
from titan_rl.core.settings import Section


class BanditEnv:
    """A `TokenEnv` whose prompt consists of all earlier states and pulls, and the next state.

    Args:
        states: State of each round, a token.
        arms: Number of arms; token number t pulls arm t modulo `arms`.
        chances: Probability that the right arm pays, and that another arm pays.
        luck: Seed of the draws. With the same pulls the same draws are made, so a rollout can be replayed.
    """

    def __init__(self, states: Sequence[int], arms: int, chances: tuple[float, float], luck: str) -> None:
        self._states = list(states)
        self._arms = arms
        self._right, self._wrong = chances
        self._luck = luck
        self._tokens = [self._states[0]]
        self._round = 0

    async def reset(self) -> TokenObservation:
        return TokenObservation(self._tokens)

    async def step(self, completion: Completion) -> TokenStep:
        is_right = completion.token_ids[0] % self._arms == self._states[self._round] % self._arms
        self._tokens = [*self._tokens, *completion.token_ids]
        drawn = random.Random(f"{self._luck}/{self._tokens}").random()
        paid = {"paid": (drawn < (self._right if is_right else self._wrong)) / len(self._states)}
        self._round += 1
        if self._round == len(self._states):
            return TokenStep(status=RolloutStatus.COMPLETED, rewards=paid)
        self._tokens = [*self._tokens, self._states[self._round]]
        return TokenStep(self._tokens, rewards=paid)

    async def close(self) -> None: ...


class EveryTokenEnds(ChatTemplateRenderer):
    """Renderer for a policy that writes no text: every token ends an answer."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._size = len(tokenizer)

    def get_stop_token_ids(self) -> list[int]:
        return list(range(self._size))


class Bandit(Section):
    """A `Task` without a base class of titan_rl. The reward is the share of the rounds that paid."""

    states: PositiveInt = 8
    arms: PositiveInt = 4
    rounds: PositiveInt = 6
    right: float = Field(default=0.9, ge=0, le=1)
    """Probability that the right arm pays."""
    wrong: float = Field(default=0.1, ge=0, le=1)
    """Probability that another arm pays."""

    def train_sample(self, seed: int, index: int) -> str:
        return f"train/{seed}/{index}"

    def validation_samples(self, count: int) -> list[str]:
        return [f"validation/{index}" for index in range(count)]

    def make_env(self, sample: str, renderer: Renderer) -> TokenEnv:
        states = random.Random(sample).choices(range(self.states), k=self.rounds)
        return BanditEnv(states, self.arms, (self.right, self.wrong), sample)

    def rubric(self) -> Rubric:
        return Rubric([env_reward("paid")])
