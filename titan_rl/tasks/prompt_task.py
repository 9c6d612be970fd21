"""A task of one prompt and one answer, with tools on the way if there are any."""

from __future__ import annotations

import inspect
import json
import random
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from titan_rl.core.calls.plain import plain_json
from titan_rl.rollout.environment.types import MessageEnv
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Message, Rollout
from titan_rl.tasks.message_task import MessageTask
from titan_rl.tasks.tools import ToolEnv, messages_of

AnswerReward = Callable[[Any, str], float | Awaitable[float]]
"""`reward(sample, answer)`: what an answer to a sample's prompt is worth."""


class PromptTask(MessageTask):
    """A `Task` of one prompt and one answer. This is a whole one:

        class Sums(PromptTask):
            def sample(self, rng):
                return rng.randint(0, 99), rng.randint(0, 99)

            def prompt(self, sample):
                return f"What is {sample[0]} + {sample[1]}?"

            def reward(self, sample, answer):
                return answer.strip() == str(sum(sample))

    Where `tools` gives some, the policy may call them before it answers: see `ToolEnv`, of which `env` may return one
    with other limits. Samples are held out by their prompts.
    """

    @abstractmethod
    def sample(self, rng: random.Random) -> Any:
        """Draw one sample, by `rng` alone: whatever `prompt` and `reward` need."""

    @abstractmethod
    def prompt(self, sample: Any) -> str | Sequence[Message]:
        """User's message, or all opening messages."""

    @abstractmethod
    def reward(self, sample: Any, answer: str) -> float | Awaitable[float]:
        """Reward of an answer; may be async. Not called for an answer that is cut off, cannot be parsed, or is missing
        after tool calls, which is worth 0. Define `rubric` to decide otherwise."""

    def tools(self, sample: Any) -> object:
        """Tools of one rollout: functions, or a fresh object whose public methods are the tools."""
        return ()

    def env(self, sample: Any) -> MessageEnv:
        return ToolEnv(self.prompt(sample), self.tools(sample))

    def rubric(self) -> Rubric:
        return answer_rubric(self.reward)

    def key(self, sample: Any) -> str:
        return json.dumps(plain_json(messages_of(self.prompt(sample))), sort_keys=True)


def answer_rubric(reward: AnswerReward, *, in_thread: bool = False) -> Rubric:
    """Rubric of one reward. A rollout without an answer, because it is cut off or cannot be parsed, is worth 0.

    Args:
        in_thread: see `Reward`.
    """

    def value(rollout: Rollout) -> float:
        return cast("float", reward(rollout.sample, answer_of(rollout)))

    async def awaited(rollout: Rollout) -> float:
        return await cast("Awaitable[float]", reward(rollout.sample, answer_of(rollout)))

    name = getattr(reward, "__name__", type(reward).__name__)
    judge = awaited if inspect.iscoroutinefunction(reward) else value
    return Rubric([Reward(judge, name=name, in_thread=in_thread)], truncated_reward=0.0, error_reward=0.0)


def answer_of(rollout: Rollout) -> str:
    """The text of the last message that the policy wrote; empty where there is none."""
    said = [message for message in rollout.messages if message.get("role") == "assistant"]
    return str(said[-1].get("content") or "") if said else ""
