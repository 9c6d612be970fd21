"""The environment protocols. An environment is single use: one instance per rollout."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from titan_rl.rollout.types import Message, Rollout, RolloutStatus
from titan_rl.types import Completion, GenerateFn, SamplingParams, require_member


@dataclass(frozen=True, slots=True)
class TokenObservation:
    """First prompt of the policy. `messages` is for transcripts only; training reads the tokens.

    Raises:
        ValueError: a message is not a mapping.
    """

    prompt_token_ids: Sequence[int]  # [num_prompt_tokens]
    messages: Sequence[Message] = ()

    def __post_init__(self) -> None:
        _require_messages(self, self.messages)


@dataclass(frozen=True, slots=True)
class TokenStep:
    """Response to a completion: either the next prompt, or the final status of the rollout.

    Raises:
        ValueError: both or neither of `prompt_token_ids` and `status` are given, `status` is not a `RolloutStatus`, a
            reward is not a finite number, or a message is not a mapping.
    """

    prompt_token_ids: Sequence[int] | None = None  # the whole next prompt
    status: RolloutStatus | None = None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    messages: Sequence[Message] = ()  # the parsed completion, then the environment's answer
    token_advantages: Sequence[float] | None = None  # [num_completion_tokens], added to the rollout's advantage
    error: str | None = None  # explanation of the status, for `Rollout.error`

    def __post_init__(self) -> None:
        if (self.prompt_token_ids is None) == (self.status is None):
            raise ValueError("TokenStep needs exactly one of prompt_token_ids (continue) and status (end)")
        _require_step(self, self.status, self.rewards, self.messages)


@runtime_checkable
class TokenEnv(Protocol):
    """Environment in tokens. Users may implement it directly."""

    async def reset(self) -> TokenObservation: ...

    async def step(self, completion: Completion) -> TokenStep:
        """Respond to a completion, which is a copy without `routed_experts`: changing it changes no record. Its tokens
        and logprobs are packed (`titan_rl.core.arrays`) and immutable; `list(...)` unpacks them."""
        ...

    async def close(self) -> None:
        """Release resources. Called exactly once, also on errors and cancellation."""
        ...


@dataclass(frozen=True, slots=True)
class MessageObservation:
    """Opening messages, and the tools that the policy may call.

    Raises:
        ValueError: a message or a tool is not a mapping.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None

    def __post_init__(self) -> None:
        _require_messages(self, self.messages)
        tools: Any = self.tools
        if tools is not None and not (
            isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in cast("Sequence[Any]", tools))
        ):
            raise ValueError(f"MessageObservation.tools is {tools!r}; it must be None or a list of mappings")


@dataclass(frozen=True, slots=True)
class MessageStep:
    """Response to a message: messages to append, or the final status of the rollout.

    Raises:
        ValueError: both are missing, `status` is not a `RolloutStatus`, a reward is not a finite number, or a message
            is not a mapping.
    """

    messages: Sequence[Message] = ()
    status: RolloutStatus | None = None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.status is None and not self.messages:
            raise ValueError("MessageStep needs messages (continue) or a status (end)")
        _require_step(self, self.status, self.rewards, self.messages)


@runtime_checkable
class MessageEnv(Protocol):
    """Environment in chat messages. `MessageTokenEnv(env, renderer)` makes it a `TokenEnv`."""

    async def reset(self) -> MessageObservation: ...

    async def step(self, message: Message) -> MessageStep:
        """Respond to a message, which is a copy."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """Access of one rollout to the policy, with any number of requests, also concurrently.

    Args:
        generate: sends a request, within the rollout's remaining time. A completion that says ABORT was interrupted
            for good. Any `request_id` will do: it comes back with the completion, while the request is sent under an ID
            made here. So a repeated request is sampled again, and a rollout that is run again after a resume gets its
            recorded answers.
        sampling: sampling parameters assumed in training. Its `seed` is the base for the seeds of the requests.
        max_context: most tokens of prompt and completion together.
        max_turns: most completions.
        time_s: time that the rollout may use itself.
        time_is_up: set when that time is used up.
        waiting: makes a context whose time does not count as the rollout's own.
        env_rewards: names of the rewards that the rubric expects of a completed rollout's turns.
    """

    rollout_id: str
    generate: GenerateFn
    sampling: SamplingParams
    max_context: int
    max_turns: int
    time_s: float
    time_is_up: asyncio.Event
    waiting: Callable[[], AbstractContextManager[object]]
    env_rewards: Sequence[str] = ()


@runtime_checkable
class AgentEnv(Protocol):
    """Environment that sends requests to the policy itself: a program with its own loop."""

    async def play(self, policy: RolloutPolicy, rollout: Rollout) -> None:
        """Fill in the rollout's `turns`, and its `messages`, `status`, `error`, `failure` and `metrics`.

        Turns whose prompt begins with all tokens of the previous turn are one training sample; others begin a new one.
        Once `policy.time_is_up` is set, it must return within `rollout.env_timeout_s` with the turns so far.
        """
        ...

    async def close(self) -> None:
        """Release resources. Called exactly once, also on errors and cancellation."""
        ...


def _require_step(
    owner: object, status: RolloutStatus | None, rewards: Mapping[str, float], messages: Sequence[Message]
) -> None:
    if status is not None:
        require_member(owner, "status", RolloutStatus)
    kind = type(owner).__name__
    if not isinstance(rewards, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f'{kind}.rewards is {rewards!r}; it must map names to numbers, such as {{"won": 1.0}}')
    for name, value in rewards.items():
        if not isinstance(name, str) or not _is_finite(value):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{kind}.rewards has {name!r}: {value!r}; it must map names to finite numbers")
    _require_messages(owner, messages)


def _require_messages(owner: object, messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping):
        raise ValueError(
            f"{type(owner).__name__}.messages is {messages!r}; "
            'it must be a list of messages, such as [{"role": "user", "content": "..."}]'
        )
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"{type(owner).__name__}.messages[{place}] is {message!r}; "
                'it must be a mapping, such as {"role": "user", "content": "..."}'
            )


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
