"""A game of many turns: guess a number, and be told whether it is higher or lower."""

from __future__ import annotations

import random
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
        self._possible = range(1, largest + 1)  # what the hints leave
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
        return MessageStep([{"role": "user", "content": self._hint(guess)}])

    async def close(self) -> None: ...

    def _hint(self, guess: int | None) -> str:
        if guess is None:
            return f"Say a number from 1 to {self._largest}."
        low, high = self._possible.start, self._possible.stop
        if guess < self._secret:
            self._possible = range(max(low, guess + 1), high)
            return "higher"
        self._possible = range(low, min(high, guess))
        return "lower"


class GuessingGame(MessageTask):
    """A game is worth half a point if the number is found in time, and another for guesses that the hints left open.
    With 15 numbers and 4 guesses, halving always finds it."""

    largest: PositiveInt = 15
    guesses: PositiveInt = 4
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Nothing is: what is learnt is how to play, and there are too few numbers to keep some of them apart."""

    careless: float = Field(default=0.5, ge=0, le=1)
    """How probable it is, at each guess of a demonstration, that the hints are forgotten."""

    def sample(self, rng: random.Random) -> int:
        return rng.randint(1, self.largest)

    def env(self, sample: int) -> MessageEnv:
        return GuessingEnv(sample, self.largest, self.guesses)

    def rubric(self) -> Rubric:
        return Rubric([env_reward("found"), env_reward("sensible")], error_reward=0.0, truncated_reward=0.0)

    def demonstrate(self, sample: int, messages: Sequence[Message], rng: random.Random) -> str:
        """Any of the numbers that are left, or any at all."""
        low, high = (1, self.largest) if rng.random() < self.careless else left_over(messages, self.largest)
        return str(rng.randint(low, high))


def left_over(messages: Sequence[Message], largest: int) -> tuple[int, int]:
    """The least and the largest number that the hints of a game leave."""
    low, high = 1, largest
    for guess, hint in zip(messages[1::2], messages[2::2], strict=True):
        if hint["content"] == "higher":
            low = max(low, int(guess["content"]) + 1)
        else:
            high = min(high, int(guess["content"]) - 1)
    return low, high
