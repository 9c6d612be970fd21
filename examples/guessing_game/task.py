"""A game of many turns: guess a number, and be told what is left."""

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
    """A `MessageEnv` that thinks of a number. Any answer uses up a guess."""

    def __init__(self, secret: int, largest: int, guesses: int) -> None:
        self._secret = secret
        self._largest = largest
        self._left = self._guesses = guesses
        self._possible = range(1, largest + 1)  # what is left
        self._sensible = 0  # guesses that were possible

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
    """A game is worth half a point if the number is found in time, and another for guesses of what was left.
    With 15 numbers and 6 guesses, any guesses of what is left find it nine times in ten."""

    largest: PositiveInt = 15
    guesses: PositiveInt = 6
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Nothing is: what is learnt is how to play, and there are too few numbers to keep some of them apart."""

    careless: float = Field(default=0.95, ge=0, le=1)
    """How probable it is, at each guess of a careless demonstration, that what is left is forgotten."""

    def sample(self, rng: random.Random) -> int:
        return rng.randint(1, self.largest)

    def env(self, sample: int) -> MessageEnv:
        return GuessingEnv(sample, self.largest, self.guesses)

    def rubric(self) -> Rubric:
        return Rubric([env_reward("found"), env_reward("sensible")], error_reward=0.0, truncated_reward=0.0)

    def demonstrate(self, sample: int, messages: Sequence[Message], rng: random.Random) -> str:
        """Any of the numbers that are left."""
        return str(rng.randint(*left_over(messages)))

    def demonstrate_carelessly(self, sample: int, messages: Sequence[Message], rng: random.Random) -> str:
        """Any of the numbers that are left, or any at all."""
        if rng.random() < self.careless:
            return str(rng.randint(1, self.largest))
        return self.demonstrate(sample, messages, rng)


def left_over(messages: Sequence[Message]) -> tuple[int, int]:
    """The least and the largest number that are left, as the user said last."""
    low, high, *_ = map(int, re.findall(r"\d+", messages[-1]["content"]))
    return low, high
