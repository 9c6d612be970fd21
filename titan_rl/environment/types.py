"""The two environment protocols. An environment is single use: one instance per rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.types import Completion


@dataclass(frozen=True, slots=True)
class TokenObservation:
    """What the policy sees first. `messages` is for transcripts only; training reads the tokens."""

    prompt_token_ids: Sequence[int]  # [num_prompt_tokens]
    messages: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class TokenStep:
    """What a completion led to: either the next prompt, or the status the rollout ends with.

    Raises:
        ValueError: both or neither of `prompt_token_ids` and `status` are given.
    """

    prompt_token_ids: Sequence[int] | None = None  # the whole next prompt
    status: RolloutStatus | None = None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    messages: Sequence[Message] = ()  # the parsed completion, then the environment's answer
    token_advantages: Sequence[float] | None = None  # [num_completion_tokens], added to the rollout's advantage

    def __post_init__(self) -> None:
        if (self.prompt_token_ids is None) == (self.status is None):
            raise ValueError("TokenStep needs exactly one of prompt_token_ids (go on) and status (end)")


@runtime_checkable
class TokenEnv(Protocol):
    """An environment that thinks in tokens. Users may implement it directly."""

    async def reset(self) -> TokenObservation: ...

    async def step(self, completion: Completion) -> TokenStep: ...

    async def close(self) -> None:
        """Called once, on every path, cancellation included."""
        ...


@dataclass(frozen=True, slots=True)
class MessageObservation:
    """The opening messages, and the tools the policy may call."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None


@dataclass(frozen=True, slots=True)
class MessageStep:
    """The environment's answer: messages to append, or the status the rollout ends with."""

    messages: Sequence[Message] = ()
    status: RolloutStatus | None = None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.status is None and not self.messages:
            raise ValueError("MessageStep needs messages (go on) or a status (end)")


@runtime_checkable
class MessageEnv(Protocol):
    """An environment that thinks in chat messages. `MessageTokenEnv(env, renderer)` makes it a `TokenEnv`."""

    async def reset(self) -> MessageObservation: ...

    async def step(self, message: Message) -> MessageStep: ...

    async def close(self) -> None: ...
