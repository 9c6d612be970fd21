"""Environments with several seats: games, debates, a user played by a model."""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.types import Completion, GenerateFn, keep_float

Reply = Message | str
"""Reply of a `MessagePlayer`: an assistant's message, or its text."""


@dataclass(frozen=True, slots=True)
class TokenPlayer:
    """Player in tokens that is not trained, such as a frozen checkpoint.

    Args:
        temperature: None takes the policy's; all other sampling parameters are the policy's.
        timeout_s: longest time of one answer.

    Raises:
        ValueError: names the field, the value and what is allowed.
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
        reply: receives the seat's conversation so far, with the opening and its own answers.
        timeout_s: longest time of one answer. None takes that of environment calls, `rollout.env_timeout_s`.

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

    A game that catches it may continue without the seat, or reward the others for that. Otherwise the game is over, and
    rollouts of other seats are UNDECIDED.

    Attributes:
        status: final status of the seat's rollout.
    """

    def __init__(self, seat: str, status: RolloutStatus, why: str) -> None:
        super().__init__(f"seat {seat!r} cannot continue ({status}): {why}")
        self.seat = seat
        self.status = status
        self.why = why


class TokenSeat(Protocol):
    """Seat of a game in tokens. Different seats may be asked concurrently, each for one answer at a time."""

    @property
    def name(self) -> str: ...

    @property
    def player(self) -> Player: ...

    async def generate(self, prompt_token_ids: Sequence[int]) -> Completion:
        """Request the next completion. One that has used up its token budget is the last.

        Returns:
            A copy for the game, without `routed_experts`.

        Raises:
            SeatOutError: the seat cannot continue.
            TypeError: it is played by a `MessagePlayer`.
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
        """Add to the seat's transcript."""
        ...

    def reward(self, name: str, value: float) -> None:
        """Give the seat a reward, for `env_reward(name)`. Rewards of one name add up. Seats of other players need none,
        but accept them."""
        ...


@runtime_checkable
class SeatedEnv(Protocol):
    """Environment with several seats, in tokens. Single use, like other environments.

    `MessageGame(env, renderer, players)` adapts a `SeatedMessageEnv`.
    """

    def players(self, sibling: int) -> Mapping[str, Player]:
        """Player of each seat in the sibling of that number. The policy should play the same seats in most siblings,
        since advantages compare rollouts of one seat."""
        ...

    async def play_seats(self, seats: Mapping[str, TokenSeat]) -> None:
        """Ask the seats, in any order, and give them their rewards. The game is over when it returns.

        An exception is an error of the environment and ends the rollouts of all seats. So does an error of generation
        or of another player, which it need not handle: the call is then cancelled where it waits.
        """
        ...

    async def close(self) -> None:
        """Release resources. Called exactly once, also on errors and cancellation."""
        ...


class MessageSeat(Protocol):
    """Seat of a game in chat messages, with its own conversation."""

    @property
    def name(self) -> str: ...

    @property
    def player(self) -> Player: ...

    async def ask(self, messages: Sequence[Message]) -> Message:
        """Append messages to the seat's conversation and return its answer.

        Raises:
            SeatOutError: its answer cannot be parsed or was cut off, or there is no room for one.
        """
        ...

    def tell(self, messages: Sequence[Message]) -> None:
        """Add messages that the seat sees before its next question, or at the end of its transcript."""
        ...

    def reward(self, name: str, value: float) -> None:
        """Give the seat a reward; see `TokenSeat.reward`."""
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
