"""A policy that speaks in messages, and whose tokens nobody knows: a model behind a chat endpoint, or a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from titan_rl.rollout.types import Message
from titan_rl.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What such a policy answers.

    Args:
        message: the assistant's, with "content", and "reasoning_content" and "tool_calls" where it has some. The
            arguments of a call are a dictionary, or the text that is none.
        num_tokens: of the reply, as far as the policy says.
    """

    message: Message
    finish_reason: FinishReason = FinishReason.STOP
    num_tokens: int | None = None


@runtime_checkable
class ChatFn(Protocol):
    """What a `GenerateFn` is where there are messages in the place of tokens. Calls run concurrently.

    Args:
        messages: the whole conversation.
        tools: that may be called, in OpenAI's form; None for none.
        request_id: unique for one call.
        session_id: stable over the turns of one rollout.
        sampling: its `stop_token_ids` mean nothing here.

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
