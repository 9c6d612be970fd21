"""Policies in chat messages whose tokens are not known, and `ChatEnv`, which plays a `MessageEnv` with one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, runtime_checkable

from titan_rl.core.plain_data import snapshot
from titan_rl.rollout.checked_copies import messages_of
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.environment.threaded import EnvMethods
from titan_rl.rollout.environment.types import MessageEnv, MessageObservation, MessageStep, RolloutPolicy
from titan_rl.rollout.group.turns import turn_seed
from titan_rl.rollout.group.user_code_boundary import RolloutEnded, UserCodeBoundary
from titan_rl.rollout.policy_text import with_prefix_marked
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.types import Message, Rollout, RolloutStatus, Turn
from titan_rl.types import Completion, FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Reply of a policy in messages.

    Args:
        message: The assistant's message, with "content", and optionally "reasoning_content" and "tool_calls". The
            arguments of a call are a dictionary, or text that cannot be parsed as one.
        finish_reason: Reason why the reply ended.
        num_tokens: Number of tokens of the reply, if the policy reports it.
        num_prompt_tokens: Number of tokens of the conversation, if the policy reports it.
    """

    message: Message
    finish_reason: FinishReason = FinishReason.STOP
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None


@runtime_checkable
class ChatFn(Protocol):
    """Policy in messages, the counterpart of a `GenerateFn`. Calls run concurrently.

    Args:
        messages: The whole conversation.
        tools: Tools that may be called, in OpenAI's form; None if there are none.
        request_id: Identifier that is unique to this call.
        session_id: Identifier that is the same for all turns of a rollout.
        sampling: Sampling parameters. Their `stop_token_ids` are ignored.

    Raises:
        titan_rl.core.errors.PromptTooLongError: the conversation leaves no room for an answer.
        titan_rl.core.errors.RequestError: this request can never succeed.
        titan_rl.core.errors.GenerationError: the infrastructure failed.
    """

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> ChatReply: ...


class ChatEnv:
    """An `AgentEnv` over a `MessageEnv`, for a policy whose tokens are not known. Its rollouts can be judged, but not
    trained on: their turns have rewards and metrics, but no tokens or logprobs.

    A rollout ends with the environment's status, or in one of these ways:

        a tool call whose arguments are not a JSON object     ERROR_PARSE
        the reply used up its token budget                    TRUNCATED_LENGTH
        the conversation leaves no room for a reply           TRUNCATED_PROMPT
        another request that fails                            ERROR_GENERATE

    If the policy reports numbers of tokens, their sum is in `Rollout.metrics["completion_tokens"]`.

    Example:

        rollouter = Rollouter(lambda sample: ChatEnv(SortEnv(sample), chat), rubric, max_context=4096)

    Args:
        env: Environment to play.
        chat: Policy.
        limits: Time limits for each call of the environment and for each reply.
    """

    def __init__(self, env: MessageEnv, chat: ChatFn, limits: RolloutConfig | None = None) -> None:
        self._env = EnvMethods(env)
        self._chat = chat
        self._limits = limits or RolloutConfig()

    async def play(self, policy: RolloutPolicy, rollout: Rollout) -> None:
        try:
            rollout.status = await self._take_turns(policy, rollout)
        except RolloutEnded as end:
            rollout.status, rollout.error, rollout.failure = end.status, end.error, end.failure
        tokens = [turn.completion.metrics.get("completion_tokens") for turn in rollout.turns]
        if tokens and None not in tokens:
            rollout.metrics["completion_tokens"] = sum(count for count in tokens if count is not None)

    async def close(self) -> None:
        await self._env.close()

    async def _take_turns(self, policy: RolloutPolicy, rollout: Rollout) -> RolloutStatus:
        async with self._env_call():
            observation = await self._env.call("reset", MessageObservation)
            rollout.messages.extend(messages_of(with_prefix_marked(observation.messages)))
            tools = None if observation.tools is None else list(observation.tools)
        for turn in range(policy.max_turns):
            reply = await self._ask(policy, rollout, tools, turn)
            answer = snapshot(reply.message)
            rollout.messages.append(answer)
            self._record(policy, rollout, reply, turn)
            if reply.finish_reason is FinishReason.LENGTH:
                return RolloutStatus.TRUNCATED_LENGTH
            if reply.finish_reason is FinishReason.ABORT:
                return RolloutStatus.ABORTED
            if any(not isinstance(call["function"]["arguments"], Mapping) for call in answer.get("tool_calls", ())):
                return RolloutStatus.ERROR_PARSE
            async with self._env_call():
                step = await self._env.call("step", MessageStep, snapshot(answer))
                rewards = {name: float(reward) for name, reward in step.rewards.items()}
                rollout.turns[-1] = replace(rollout.turns[-1], rewards=rewards)
                marked = with_prefix_marked(step.messages) if step.status is None else step.messages
                rollout.messages.extend(messages_of(marked))
            if step.status is not None:
                return step.status
        return RolloutStatus.TRUNCATED_TURNS

    async def _ask(
        self, policy: RolloutPolicy, rollout: Rollout, tools: list[Mapping[str, object]] | None, turn: int
    ) -> ChatReply:
        seed = None if policy.sampling.seed is None else turn_seed(policy.sampling.seed, rollout.rollout_id, turn)
        messages: list[Message] = snapshot(rollout.messages)
        deadline = asyncio.get_running_loop().time() + self._limits.generate_timeout_s
        async with UserCodeBoundary(RolloutStatus.ERROR_GENERATE, deadline):
            request = self._chat(
                messages,
                tools=tools,
                request_id=f"{rollout.rollout_id}/{turn}",
                session_id=rollout.rollout_id,
                sampling=replace(policy.sampling, seed=seed),
            )
            reply = await _unless(policy.time_is_up, request)
        if reply is None:
            status = RolloutStatus.TRUNCATED_TIME if rollout.turns else RolloutStatus.ERROR_TIMEOUT
            raise RolloutEnded(status, f"its own time is up: rollout_timeout_s is {policy.time_s:g}")
        return reply

    def _record(self, policy: RolloutPolicy, rollout: Rollout, reply: ChatReply, turn: int) -> None:
        metrics = {} if reply.num_tokens is None else {"completion_tokens": float(reply.num_tokens)}
        completion = Completion(f"{rollout.rollout_id}/{turn}", (), (), reply.finish_reason, (), metrics=metrics)
        rollout.turns.append(Turn((), completion, sampling=policy.sampling))

    def _env_call(self) -> AbstractAsyncContextManager[None]:
        deadline = asyncio.get_running_loop().time() + self._limits.env_timeout_s
        return UserCodeBoundary(RolloutStatus.ERROR_ENV, deadline)


async def _unless(time_is_up: asyncio.Event, reply: Any) -> ChatReply | None:
    """Wait for the reply; None if the time is up first."""
    replying = asyncio.ensure_future(reply)
    waiting = asyncio.ensure_future(time_is_up.wait())
    try:
        await asyncio.wait({replying, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not replying.done():
            return None
        answer: Any = await replying
        if not isinstance(answer, ChatReply):
            raise TypeError(f"the policy returned {type(answer).__name__}; it must return a ChatReply")
        return answer
    finally:
        replying.cancel()
        waiting.cancel()


class NoTokens:
    """Renderer for environments of a policy whose tokens are not known. It raises an error instead of rendering."""

    def render_ids(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("this policy answers with messages, so its tokens are unknown")

    parse_response = bridge_to_next_turn = render_ids

    def get_stop_token_ids(self) -> list[int]:
        return []


def message_env_of(env: object) -> MessageEnv:
    """Message environment inside an environment that a task made.

    Raises:
        TypeError: the environment plays in tokens.
    """
    if isinstance(env, MessageTokenEnv):
        return env.env
    raise TypeError(f"{type(env).__name__} uses tokens, but this policy answers with messages; request tokens from it")
