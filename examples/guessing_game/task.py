"""Game of many turns: guess a number; after each wrong guess the remaining range is shown."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from pydantic import Field, PositiveInt

from titan_rl import (
    Message,
    MessageEnv,
    MessageObservation,
    MessageStep,
    MessageTask,
    RolloutStatus,
    Rubric,
    env_reward,
)


class GuessingEnv:
    """A `MessageEnv` with a secret number. Any answer uses up a guess."""

    def __init__(self, secret: int, largest: int, guesses: int) -> None:
        self._secret = secret
        self._largest = largest
        self._left = self._guesses = guesses
        self._possible = range(1, largest + 1)  # numbers that are not ruled out
        self._sensible = 0  # guesses among these

    async def reset(self) -> MessageObservation:
        text = f"I think of a number from 1 to {self._largest}. You have {self._left} guesses."
        return MessageObservation([{"role": "user", "content": text}])

    async def step(self, message: Message) -> MessageStep:
        text = str(message["content"]).strip()
        guess = int(text) if text.isdecimal() and len(text) < 10 else None
        self._left -= 1
        self._sensible += guess in self._possible
        if guess == self._secret or not self._left:
            sensible = self._sensible / (self._guesses - self._left)
            rewards = {"found": float(guess == self._secret), "sensible": sensible}
            return MessageStep(status=RolloutStatus.COMPLETED, rewards=rewards)
        if guess is not None:
            self._rule_out(guess)
        return MessageStep([{"role": "user", "content": f"It is from {self._possible[0]} to {self._possible[-1]}."}])

    async def close(self) -> None: ...

    def _rule_out(self, guess: int) -> None:
        low, high = self._possible.start, self._possible.stop
        above = guess < self._secret
        self._possible = range(max(low, guess + 1), high) if above else range(low, min(high, guess))


class GuessingGame(MessageTask):
    """Task of one game. Half of the reward is for finding the number in time, and half is the share of guesses that
    were not ruled out. With 15 numbers and 6 guesses, such guesses find the number in nine games of ten."""

    largest: PositiveInt = 15
    guesses: PositiveInt = 6
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of held-out numbers: none, because the policy learns a strategy and there are only a few numbers."""

    careless: float = Field(default=0.95, ge=0, le=1)
    """Probability, at each guess of a careless demonstration, of a guess that ignores the remaining range."""

    def sample(self, rng: random.Random) -> int:
        return rng.randint(1, self.largest)

    def env(self, sample: int) -> MessageEnv:
        return GuessingEnv(sample, self.largest, self.guesses)

    def rubric(self) -> Rubric:
        return Rubric([env_reward("found"), env_reward("sensible")], error_reward=0.0, truncated_reward=0.0)

    def demonstrate(self, sample: int, messages: Sequence[Message], rng: random.Random) -> str:
        """Guess any number of the remaining range."""
        return str(rng.randint(*remaining(messages)))

    def demonstrate_carelessly(self, sample: int, messages: Sequence[Message], rng: random.Random) -> str:
        """Guess any number of the remaining range, or any number at all."""
        if rng.random() < self.careless:
            return str(rng.randint(1, self.largest))
        return self.demonstrate(sample, messages, rng)


def remaining(messages: Sequence[Message]) -> tuple[int, int]:
    """Smallest and largest remaining number in the user's last message."""
    low, high, *_ = map(int, re.findall(r"\d+", messages[-1]["content"]))
    return low, high
