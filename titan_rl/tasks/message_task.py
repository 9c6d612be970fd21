"""A task of chat messages: of samples that are drawn, and some of them held out."""

from __future__ import annotations

import hashlib
import random
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from titan_rl.core.errors import ConfigError, DataError
from titan_rl.core.settings import Section
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.environment.types import MessageEnv, TokenEnv
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.task import Demonstration
from titan_rl.rollout.types import Message
from titan_rl.tasks.demonstrating import Player, demonstrated

MOST_DRAWS = 1000
"""For one sample on the wanted side of the partition."""

CARELESS = 1 / 6
"""Share of the demonstrations that are careless, where a task has such: the last ones."""


class MessageTask(Section):
    """A `Task` that says how a sample is drawn, and what is played with it: the rest follows.

    Fields that a subclass declares are settings of `[task]`.

    Example:

        class Guess(MessageTask):
            largest: int = 16

            def sample(self, rng):
                return rng.randint(1, self.largest)

            def env(self, sample):
                return GuessEnv(sample)  # a MessageEnv

            def rubric(self):
                return Rubric([env_reward("won")])
    """

    held_out: float = Field(default=0.1, ge=0, lt=1)
    """Share of all different samples that only validation sees. 0 validates on what is trained on."""

    @abstractmethod
    def sample(self, rng: random.Random) -> Any:
        """Draw one sample, by `rng` alone."""

    @abstractmethod
    def env(self, sample: Any) -> MessageEnv:
        """A fresh environment for one rollout."""

    @abstractmethod
    def rubric(self) -> Rubric: ...

    def key(self, sample: Any) -> str:
        """What says of two samples whether they are the same, and so held out together. By default their `repr`."""
        return repr(sample)

    def demonstrate(self, sample: Any, messages: Sequence[Message], rng: random.Random) -> str | Message:
        """What a demonstration's assistant says next: text, or a whole message, with calls of tools for instance (see
        `call_of`). `titan-rl sft` teaches that. For reinforcement learning to have something left to do, it should be
        right only sometimes; or always, and `demonstrate_carelessly` only sometimes.

        Args:
            messages: the conversation so far.
        """
        raise NotImplementedError

    def demonstrate_carelessly(self, sample: Any, messages: Sequence[Message], rng: random.Random) -> str | Message:
        """The same for the last `CARELESS` of all demonstrations. With `sft.shuffle = false` a model learns a skill by
        the others, and then to use it rarely, so that reinforcement learning soon brings it out. By default they are
        as the others."""
        return self.demonstrate(sample, messages, rng)

    def demonstrations(self, count: int) -> Iterator[Demonstration]:
        """By playing environments of training samples with `demonstrate`.

        Raises:
            ConfigError: there is no `demonstrate`.
        """
        if type(self).demonstrate is MessageTask.demonstrate:
            raise ConfigError(
                f"{type(self).__name__} shows nothing to learn from; define demonstrate(self, sample, messages, rng), "
                "which says what the assistant answers"
            )
        careful = count - int(CARELESS * count)
        yield from demonstrated(self._demonstration(number, careless=number >= careful) for number in range(count))

    def _demonstration(self, number: int, *, careless: bool) -> tuple[MessageEnv, Player]:
        sample = self._draw(f"demonstration/{number}", held_out=False)
        rng = random.Random(f"demonstrated/{number}")
        say = self.demonstrate_carelessly if careless else self.demonstrate
        return self.env(sample), lambda messages: say(sample, messages, rng)

    def train_sample(self, seed: int, index: int) -> Any:
        return self._draw(f"train/{seed}/{index}", held_out=False)

    def validation_samples(self, count: int) -> list[Any]:
        return [self._draw(f"validation/{index}", held_out=True) for index in range(count)]

    def make_env(self, sample: Any, renderer: Renderer) -> TokenEnv:
        return MessageTokenEnv(self.env(sample), renderer)

    def is_held_out(self, sample: Any) -> bool:
        """Whether only validation sees it.

        Raises:
            DataError: its key names an address, which is another one in each process.
        """
        key = self.key(sample)
        if re.search(r" at 0x[0-9a-f]+>", key):
            raise DataError(
                f"the key of a sample is {key!r}, which is not the same in each process; make samples dataclasses, "
                f"or define {type(self).__name__}.key"
            )
        digest = hashlib.blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.held_out * 2**64

    def _draw(self, key: str, *, held_out: bool) -> Any:
        """
        Raises:
            DataError: no such sample was found.
        """
        rng = random.Random(key)  # from a string, so the same in every process
        for _ in range(MOST_DRAWS):
            sample = self.sample(rng)
            if not self.held_out or self.is_held_out(sample) == held_out:
                return sample
        side = "held-out" if held_out else "training"
        raise DataError(
            f"{type(self).__name__}.sample gave no {side} sample in {MOST_DRAWS} draws with held_out = "
            f"{self.held_out}; have it draw from more different ones, or set held_out = 0"
        )
