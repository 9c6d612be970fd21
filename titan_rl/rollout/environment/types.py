"""Environment protocols: in tokens, in chat messages, with an agent's own loop, and with several seats.

An environment is single use: each rollout has its own instance.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, runtime_checkable

from titan_rl.rollout.types import Message, Rollout, RolloutStatus
from titan_rl.types import Completion, GenerateFn, SamplingParams, keep_float, require_member


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
    """Environment in tokens, used by one rollout.

    The rollouter calls `reset` once, `step` after each completion until it returns a status, and then `close`. For an
    environment in chat messages, implement a `MessageEnv` instead and wrap it in a `MessageTokenEnv`.

    Example: an environment of one turn, which rewards the token 7:

        class Lucky:
            async def reset(self):
                return TokenObservation([1, 2])

            async def step(self, completion):
                won = float(7 in completion.token_ids)
                return TokenStep(status=RolloutStatus.COMPLETED, rewards={"won": won})

            async def close(self): ...
    """

    async def reset(self) -> TokenObservation:
        """Begin the episode and return the first prompt."""
        ...

    async def step(self, completion: Completion) -> TokenStep:
        """Respond to a completion with the next prompt, or with the final status.

        Args:
            completion: Copy without `routed_experts`. Its tokens and logprobs are packed (`titan_rl.core.arrays`) and
                immutable; `list(...)` unpacks them.
        """
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
        ValueError: there are neither messages nor a status, `status` is not a `RolloutStatus`, a reward is not a finite
            number, or a message is not a mapping.
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
    """Environment in chat messages, used by one rollout. `MessageTokenEnv(env, renderer)` makes it a `TokenEnv`."""

    async def reset(self) -> MessageObservation:
        """Begin the episode and return the opening messages, with the tools if there are any."""
        ...

    async def step(self, message: Message) -> MessageStep:
        """Respond to the assistant's message. The argument is a copy that may be changed."""
        ...

    async def close(self) -> None:
        """Release resources. Called exactly once, also on errors and cancellation."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """Access of one rollout to the policy, with any number of requests, also concurrently.

    Args:
        rollout_id: ID of the rollout.
        generate: Sends a request, within the rollout's remaining time. A completion with finish reason ABORT was
            interrupted and is not continued. The `request_id` is only returned with the completion; the request is
            sent under an ID derived from prompt and sampling. A repeated request is therefore sampled again, and a
            rollout that is replayed after a resume gets its recorded answers.
        sampling: Sampling parameters assumed in training. Their `seed` is the base of the requests' seeds.
        max_context: Largest number of tokens of prompt and completion together.
        max_turns: Largest number of completions.
        time_s: Seconds that the rollout may use itself.
        time_is_up: Event that is set when this time is used up.
        waiting: Returns a context manager; time within it does not count as the rollout's own.
        env_rewards: Names of the rewards that the rubric expects of a completed rollout's turns.
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

        A turn whose prompt begins with all tokens of the previous turn extends that turn's training sample; any other
        turn begins a new sample. Once `policy.time_is_up` is set, return within `rollout.env_timeout_s`.
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
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"{type(owner).__name__}.messages[{index}] is {message!r}; "
                'it must be a mapping, such as {"role": "user", "content": "..."}'
            )


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


Reply = Message | str
"""Reply of a `MessagePlayer`: an assistant's message, or its text."""


@dataclass(frozen=True, slots=True)
class TokenPlayer:
    """Player in tokens that is not trained, such as a frozen checkpoint.

    Args:
        generate: Generates the player's answers.
        temperature: Sampling temperature; None takes the policy's. All other sampling parameters are the policy's.
        timeout_s: Time limit of one answer.

    Raises:
        ValueError: a value is not allowed. The message names the field, the value and what is allowed.
    """

    generate: GenerateFn
    temperature: float | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.temperature is not None:
            keep_float(self, "temperature", 0.0, sys.float_info.max, "None, or finite and at least 0")
        keep_float(self, "timeout_s", math.ulp(0.0), math.inf, "positive")


@dataclass(frozen=True, slots=True)
class MessagePlayer:
    """Player in messages that is not trained: a script, or an endpoint.

    Args:
        reply: Function from the seat's conversation so far, including the opening and its own answers, to its reply.
        timeout_s: Time limit of one answer. None takes that of environment calls, `rollout.env_timeout_s`.

    Example: `MessagePlayer(lambda messages: "pass")`

    Raises:
        ValueError: `timeout_s` is not positive.
    """

    reply: Callable[[Sequence[Message]], Reply | Awaitable[Reply]]
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            keep_float(self, "timeout_s", math.ulp(0.0), math.inf, "positive or None")


Player = Literal["policy"] | TokenPlayer | MessagePlayer
"""Player of a seat. "policy" is the policy in training: each seat that it plays becomes a rollout."""


class SeatOutError(Exception):
    """A seat cannot continue: its answer cannot be parsed or is late, or there is no room for another.

    A game may catch it, and continue without the seat or reward the other seats. If it does not, the game is over and
    the rollouts of the other seats are UNDECIDED.

    Attributes:
        seat: Name of the seat.
        status: Final status of the seat's rollout.
        why: Explanation of the status.
    """

    def __init__(self, seat: str, status: RolloutStatus, why: str) -> None:
        super().__init__(f"seat {seat!r} cannot continue ({status}): {why}")
        self.seat = seat
        self.status = status
        self.why = why


class Seat(Protocol):
    """Seat of a game."""

    @property
    def name(self) -> str: ...

    @property
    def player(self) -> Player: ...

    def reward(self, name: str, value: float) -> None:
        """Give the seat a reward, for `env_reward(name)`. Rewards with the same name add up. Rewards of seats that the
        policy does not play are ignored."""
        ...


class TokenSeat(Seat, Protocol):
    """Seat of a game in tokens. Different seats may be asked concurrently, each for one answer at a time."""

    async def generate(self, prompt_token_ids: Sequence[int]) -> Completion:
        """Request the next completion. A completion that has used up its token budget is the last one.

        Returns:
            A copy for the game, without `routed_experts`.

        Raises:
            SeatOutError: the seat cannot continue.
            TypeError: the seat is played by a `MessagePlayer`.
        """
        ...

    async def reply(self, messages: Sequence[Message]) -> Message:
        """Request the next reply of a `MessagePlayer`, as an assistant's message.

        Raises:
            TypeError: the seat has another kind of player.
        """
        ...

    def leave(self, status: RolloutStatus, why: str) -> SeatOutError:
        """Take the seat out of the game. Returns the error to raise."""
        ...

    def record(self, messages: Sequence[Message]) -> None:
        """Add messages to the seat's transcript."""
        ...


@runtime_checkable
class SeatedEnv(Protocol):
    """Environment with several seats, in tokens. `MessageGame(env, renderer, players)` makes one of a
    `SeatedMessageEnv`.
    """

    def players(self, sibling: int) -> Mapping[str, Player]:
        """Player of each seat, for the sibling with this number. The policy should play the same seats in most
        siblings, since advantages compare rollouts of one seat."""
        ...

    async def play_seats(self, seats: Mapping[str, TokenSeat]) -> None:
        """Ask the seats, in any order, and give them their rewards. The game is over when this method returns.

        An exception is an error of the environment and ends the rollouts of all seats. An error of generation or of
        another player also ends them; the environment need not handle it, because its call is cancelled where it waits.
        """
        ...

    async def close(self) -> None:
        """Release resources. Called exactly once, also on errors and cancellation."""
        ...


class MessageSeat(Seat, Protocol):
    """Seat of a game in chat messages, with its own conversation."""

    async def ask(self, messages: Sequence[Message]) -> Message:
        """Append messages to the seat's conversation and return its answer.

        Raises:
            SeatOutError: the answer cannot be parsed or was cut off, or there is no room for an answer.
        """
        ...

    def tell(self, messages: Sequence[Message]) -> None:
        """Add messages that the seat sees before its next question, or at the end of its transcript."""
        ...


@runtime_checkable
class SeatedMessageEnv(Protocol):
    """Environment with several seats, in chat messages.

    Example: a game of one question, in which both seats answer at once:

        class Match:
            async def play_seats(self, seats):
                question = [{"role": "user", "content": "Heads or tails?"}]
                first, second = await asyncio.gather(*(seat.ask(question) for seat in seats.values()))
                same = first["content"] == second["content"]
                seats["matcher"].reward("won", float(same))
                seats["other"].reward("won", float(not same))

            async def close(self): ...
    """

    async def play_seats(self, seats: Mapping[str, MessageSeat]) -> None:
        """Ask the seats and give them their rewards; see `SeatedEnv.play_seats`."""
        ...

    async def close(self) -> None: ...
