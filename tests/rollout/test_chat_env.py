"""Message environments, played by a policy whose tokens are unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from titan_rl import (
    MessageObservation,
    MessageStep,
    PromptTooLongError,
    Reward,
    Rollout,
    RolloutConfig,
    Rollouter,
    RolloutStatus,
    Rubric,
    SamplingParams,
    env_reward,
)
from titan_rl.core.errors import GenerationError
from titan_rl.rollout.chat_env import ChatEnv, ChatReply
from titan_rl.types import FinishReason

TOOLS = [{"type": "function", "function": {"name": "look"}}]


class Echo:
    """Environment that asks twice, and records the replies."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.closed = 0

    async def reset(self) -> MessageObservation:
        return MessageObservation([{"role": "user", "content": "Say."}], TOOLS)

    async def step(self, message: Any) -> MessageStep:
        self.replies.append(message)
        if len(self.replies) == 2:
            return MessageStep(status=RolloutStatus.COMPLETED, rewards={"said": len(message["content"])})
        return MessageStep([{"role": "user", "content": "More."}])

    async def close(self) -> None:
        self.closed += 1


class Chat:
    """Policy that returns prepared replies in order. An exception is raised, and an event is awaited."""

    def __init__(self, *replies: Any) -> None:
        self.asked: list[tuple[list[Any], Any, str, SamplingParams]] = []
        self._replies = list(replies)

    async def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> ChatReply:
        self.asked.append((list(messages), tools, request_id, sampling))
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, asyncio.Event):
            await reply.wait()
        return reply


def says(text: str, **more: Any) -> ChatReply:
    return ChatReply({"role": "assistant", "content": text}, **more)


def calls(arguments: Any) -> ChatReply:
    call = {"type": "function", "id": "c", "function": {"name": "look", "arguments": arguments}}
    return ChatReply({"role": "assistant", "content": "", "tool_calls": [call]})


async def played(*replies: Any, env: Any = None, **limits: Any) -> tuple[Rollout, Echo, Chat]:
    env, chat = env or Echo(), Chat(*replies)
    settings = RolloutConfig(**limits)
    rollouter = Rollouter(
        lambda sample: ChatEnv(env, chat, settings),
        Rubric([env_reward("said"), Reward(lambda rollout: float(len(rollout.messages)), 0.0, "messages")]),
        max_context=8,
        limits=settings,
        seed=5,
    )
    group = await rollouter.run_group(
        chat_less, None, group_id="g", group_size=1, sampling=SamplingParams(max_tokens=4)
    )
    return group.rollouts[0], env, chat


async def chat_less(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a chat needs no tokens")


async def test_conversation_is_played_to_its_end_and_judged() -> None:
    rollout, env, chat = await played(says("a", num_tokens=2), says("bcd", num_tokens=3))
    assert rollout.status is RolloutStatus.COMPLETED
    assert (rollout.reward, rollout.reward_breakdown) == (3.0, {"said": 3.0, "messages": 4.0})
    assert [message["content"] for message in rollout.messages] == ["Say.", "a", "More.", "bcd"]
    assert rollout.metrics["completion_tokens"] == 5.0
    assert env.closed == 1
    (first, tools, request_id, sampling), (second, _, _, other) = chat.asked
    assert (len(first), len(second), tools, request_id) == (1, 3, TOOLS, "g/0/0")
    assert None is not sampling.seed != other.seed


async def test_chat_turns_have_no_tokens_or_logprobs() -> None:
    rollout, _, _ = await played(says("a"), says("b"))
    assert [(turn.prompt_token_ids, turn.completion.token_ids, turn.completion.logprobs) for turn in rollout.turns] == [
        ((), (), ())
    ] * 2
    assert rollout.num_completion_tokens == 0
    assert "completion_tokens" not in rollout.metrics


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (says("a", finish_reason=FinishReason.LENGTH), RolloutStatus.TRUNCATED_LENGTH),
        (calls("{"), RolloutStatus.ERROR_PARSE),
        (PromptTooLongError("512 tokens"), RolloutStatus.TRUNCATED_PROMPT),
        (GenerationError("down"), RolloutStatus.ERROR_GENERATE),
        ("text", RolloutStatus.ERROR_GENERATE),
    ],
)
async def test_reply_determines_the_rollout_status(reply: Any, status: RolloutStatus) -> None:
    rollout, env, _ = await played(reply)
    assert rollout.status is status
    assert env.replies == []
    assert (rollout.reward is not None) == bool(rollout.turns and status.is_truncated)


async def test_tool_call_arguments_reach_the_environment_as_objects() -> None:
    rollout, env, _ = await played(calls({"at": 1}), says("b"))
    assert rollout.status is RolloutStatus.COMPLETED
    assert env.replies[0]["tool_calls"][0]["function"]["arguments"] == {"at": 1}


async def test_environment_error_is_not_blamed_on_the_endpoint() -> None:
    class Broken(Echo):
        async def step(self, message: Any) -> MessageStep:
            raise KeyError("answer")

    rollout, _, _ = await played(says("a"), env=Broken())
    assert rollout.status is RolloutStatus.ERROR_ENV
    assert rollout.error == "KeyError: 'answer'"
    assert rollout.failure is not None
    assert "test_chat_env.py" in str(rollout.failure.where)


@pytest.mark.looptime
async def test_time_limits_end_a_chat_rollout() -> None:
    never = asyncio.Event()
    rollout, _, _ = await played(says("a"), never, rollout_timeout_s=0.05)
    assert rollout.status is RolloutStatus.TRUNCATED_TIME
    rollout, _, _ = await played(never, rollout_timeout_s=0.05)
    assert rollout.status is RolloutStatus.ERROR_TIMEOUT
    rollout, _, _ = await played(never, generate_timeout_s=0.05)
    assert rollout.status is RolloutStatus.ERROR_TIMEOUT


async def test_max_turns_truncates_a_chat_rollout() -> None:
    rollout, _, _ = await played(says("a"), max_turns=1)
    assert rollout.status is RolloutStatus.TRUNCATED_TURNS
