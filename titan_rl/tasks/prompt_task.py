"""`PromptTask`, a task of one prompt and one answer with a reward, and optionally tools."""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from titan_rl.core.calls.plain import plain_json
from titan_rl.core.calls.user_code import is_async
from titan_rl.rollout.environment.types import MessageEnv
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Message, Rollout
from titan_rl.tasks.message_task import MessageTask
from titan_rl.tasks.tools import ToolEnv, messages_of

AnswerReward = Callable[[Any, str], float | Awaitable[float]]
"""Function `reward(sample, answer)`: reward of an answer to the prompt of a sample."""


class PromptTask(MessageTask):
    """Base class of a `Task` of one prompt and one answer. This one is complete:

        class Sums(PromptTask):
            def sample(self, rng):
                return rng.randint(0, 99), rng.randint(0, 99)

            def prompt(self, sample):
                return f"What is {sample[0]} + {sample[1]}?"

            def reward(self, sample, answer):
                return answer.strip() == str(sum(sample))

    If there are `tools`, the policy may call them before it answers, as in a `ToolEnv`; override `env` for other
    limits. Samples with equal prompts are held out together.
    """

    @abstractmethod
    def sample(self, rng: random.Random) -> Any:
        """Draw one sample, with no other randomness than `rng`. It contains what `prompt` and `reward` need."""

    @abstractmethod
    def prompt(self, sample: Any) -> str | Sequence[Message]:
        """The user's message, or all opening messages."""

    @abstractmethod
    def reward(self, sample: Any, answer: str) -> float | Awaitable[float]:
        """Reward of an answer. The method may be async. It is not called for an answer that is cut off, cannot be
        parsed, or is missing after tool calls: such an answer has reward 0. Override `rubric` to change that."""

    def tools(self, sample: Any) -> object:
        """Tools of one rollout: functions, or a fresh object whose public methods are the tools."""
        return ()

    def env(self, sample: Any) -> MessageEnv:
        return ToolEnv(self.prompt(sample), self.tools(sample))

    @property
    def is_single_turn(self) -> bool:
        """Whether no rollout has a second turn, because the task has neither tools nor its own environment."""
        kind = type(self)
        return kind.tools is PromptTask.tools and kind.env is PromptTask.env and kind.make_env is PromptTask.make_env

    def rubric(self) -> Rubric:
        return answer_rubric(self.reward)

    def key(self, sample: Any) -> str:
        return json.dumps(plain_json(messages_of(self.prompt(sample))), sort_keys=True)


def answer_rubric(reward: AnswerReward, *, in_thread: bool = False) -> Rubric:
    """Make a rubric of one reward. A rollout whose answer is cut off or cannot be parsed has reward 0.

    Args:
        reward: Function of the sample and the answer.
        in_thread: Whether a sync function runs in a worker thread; see `Reward`.
    """

    def value(rollout: Rollout) -> float:
        return cast("float", reward(rollout.sample, answer_of(rollout)))

    async def awaited(rollout: Rollout) -> float:
        return await cast("Awaitable[float]", reward(rollout.sample, answer_of(rollout)))

    name = getattr(reward, "__name__", type(reward).__name__)
    judge = awaited if is_async(reward) else value
    return Rubric([Reward(judge, name=name, in_thread=in_thread)], truncated_reward=0.0, error_reward=0.0)


def answer_of(rollout: Rollout) -> str:
    """Text of the last message that the policy wrote; empty if there is none."""
    answers = [message for message in rollout.messages if message.get("role") == "assistant"]
    return str(answers[-1].get("content") or "") if answers else ""
