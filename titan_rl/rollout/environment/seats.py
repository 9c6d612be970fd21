"""Environments with several seats: games, debates, a user who is played by a model."""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.types import Completion, GenerateFn, keep_float

Reply = Message | str
"""What a `MessagePlayer` says: an assistant's message, or its text."""


@dataclass(frozen=True, slots=True)
class TokenPlayer:
    """One that is asked in tokens and not trained, such as a frozen checkpoint.

    Args:
        temperature: None is that of the policy, as all else of its sampling is.
        timeout_s: of one answer.

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
    """One that is asked in messages and not trained: a script, or an endpoint.

    Args:
        reply: is given the seat's conversation so far, the opening and its own answers included.
        timeout_s: of one answer. None is that of the environment's calls, `rollout.env_timeout_s`.

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
"""Who plays a seat. "policy" is the policy in training: each seat that it plays becomes a rollout."""


class SeatOutError(Exception):
    """A seat cannot go on: its answer cannot be read or does not end in time, or there is no room for another.

    A game that catches it may go on without the seat, or give the others what they have won by that. Otherwise the
    game is over: rollouts of other seats are UNDECIDED.

    Attributes:
        status: what the seat's rollout ends with.
    """

    def __init__(self, seat: str, status: RolloutStatus, why: str) -> None:
        super().__init__(f"seat {seat!r} cannot go on ({status}): {why}")
        self.seat = seat
        self.status = status
        self.why = why


class TokenSeat(Protocol):
    """A seat as a game in tokens sees it. Different seats may be asked at once, each for one answer at a time."""

    @property
    def name(self) -> str: ...

    @property
    def player(self) -> Player: ...

    async def generate(self, prompt_token_ids: Sequence[int]) -> Completion:
        """The next completion of a seat that is asked in tokens. One that has used up its token budget is the last.

        Returns:
            the game's own copy, without `routed_experts`.

        Raises:
            SeatOutError: the seat cannot go on.
            TypeError: it is played by a `MessagePlayer`.
        """
        ...

    async def reply(self, messages: Sequence[Message]) -> Message:
        """What a `MessagePlayer` says next, as an assistant's message.

        Raises:
            TypeError: the seat is played by another.
        """
        ...

    def leave(self, status: RolloutStatus, why: str) -> SeatOutError:
        """The seat goes on no more. Returns what is to be raised."""
        ...

    def record(self, messages: Sequence[Message]) -> None:
        """Add to the seat's transcript."""
        ...

    def reward(self, name: str, value: float) -> None:
        """Give the seat a reward, for `env_reward(name)`. Those of one name add up. A seat that is not the policy's
        needs none and may be given one all the same."""
        ...


@runtime_checkable
class SeatedEnv(Protocol):
    """An environment with several seats that thinks in tokens. Single use, as others are.

    `MessageGame(env, renderer, players)` makes one of a `SeatedMessageEnv`.
    """

    def players(self, sibling: int) -> Mapping[str, Player]:
        """Who plays each seat in the sibling of that number. The seats that the policy plays are the same in name for
        as many siblings as possible: advantages compare rollouts of one seat."""
        ...

    async def play_seats(self, seats: Mapping[str, TokenSeat]) -> None:
        """Ask the seats, in whatever order, and give them their rewards. The game is over when it returns.

        What it raises is an error of the environment and ends the rollouts of all seats. So does an error of generation
        or of another player, which it need not handle: the call is then cancelled where it waits.
        """
        ...

    async def close(self) -> None:
        """Called once, on every path, cancellation included."""
        ...


class MessageSeat(Protocol):
    """A seat as a game of chat messages sees it. It has a conversation of its own."""

    @property
    def name(self) -> str: ...

    @property
    def player(self) -> Player: ...

    async def ask(self, messages: Sequence[Message]) -> Message:
        """Append messages to the seat's conversation; return what it says next.

        Raises:
            SeatOutError: its answer cannot be parsed or was cut off, or there is no room for one.
        """
        ...

    def tell(self, messages: Sequence[Message]) -> None:
        """What the seat sees before what it is asked next; at the end of the game, what its transcript ends with."""
        ...

    def reward(self, name: str, value: float) -> None:
        """As `TokenSeat.reward`."""
        ...


@runtime_checkable
class SeatedMessageEnv(Protocol):
    """An environment with several seats that thinks in chat messages.

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
        """As `SeatedEnv.play_seats`."""
        ...

    async def close(self) -> None: ...
