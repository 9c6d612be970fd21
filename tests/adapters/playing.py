"""Play an adapter's environments with policies of messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from titan_rl.rollout.chat_env import ChatEnv, ChatReply
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.types import Message, RolloutGroup
from titan_rl.types import SamplingParams

Policy = Callable[[Sequence[Message]], str | Message]


def calling(name: str, **arguments: Any) -> Message:
    call = {"type": "function", "id": "1", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def free_square(messages: Sequence[Message]) -> str:
    """Play tic-tac-toe by taking the first free square."""
    return re.findall(r"'(\[\d\])'", messages[-1]["content"])[0]


async def play(task: Any, sample: Any, *policies: Policy, **limits: Any) -> RolloutGroup:
    """Play a group with one sibling for each policy."""
    waiting = list(policies)
    settings = RolloutConfig(**{"max_turns": 32, **limits})

    def make_env(sample: Any) -> ChatEnv:
        policy = waiting.pop(0)

        async def chat(messages: Sequence[Message], **_: Any) -> ChatReply:
            reply = policy(messages)
            return ChatReply({"role": "assistant", "content": reply} if isinstance(reply, str) else reply)

        return ChatEnv(task.env(sample), chat, settings)

    rollouter = Rollouter(make_env, task.rubric(), max_context=10_000, limits=settings)
    sampling = SamplingParams(max_tokens=100)
    return await rollouter.run_group(_no_tokens, sample, group_id="g", group_size=len(policies), sampling=sampling)


async def _no_tokens(*_: Any, **__: Any) -> Any:
    raise AssertionError("the policy speaks in messages")
