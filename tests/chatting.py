"""Plays the environment of an example with a policy that is a function of the conversation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from titan_rl import Message, MessageTask, Rollout, Rollouter, SamplingParams
from titan_rl.rollout.chat_env import ChatEnv, ChatReply


async def play(task: MessageTask, sample: Any, say: Callable[[Sequence[Message]], str | Message]) -> Rollout:
    async def chat(messages, *, tools=None, request_id, session_id=None, sampling) -> ChatReply:
        reply = say(messages)
        return ChatReply({"role": "assistant", "content": reply} if isinstance(reply, str) else reply)

    async def no_tokens(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("requested tokens instead of messages")

    rollouter = Rollouter(lambda sample: ChatEnv(task.env(sample), chat), task.rubric(), max_context=512)
    sampling = SamplingParams(max_tokens=64)
    group = await rollouter.run_group(no_tokens, sample, group_id="g", group_size=1, sampling=sampling)
    return group.rollouts[0]


async def mean_demonstrated(task: MessageTask, count: int, *, carelessly: bool = False) -> float:
    """Mean reward of the demonstrations of a task."""
    rng, rewards = random.Random(0), list[float]()
    demonstrate = task.demonstrate_carelessly if carelessly else task.demonstrate
    for index in range(count):
        sample = task.train_sample(0, index)
        rollout = await play(task, sample, lambda messages, sample=sample: demonstrate(sample, messages, rng))
        assert rollout.reward is not None, rollout.error
        rewards.append(rollout.reward)
    return sum(rewards) / count
