"""Environments that show what happens in them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from titan_rl.evaluation.play.screen import Screen
from titan_rl.rollout.environment.methods import EnvMethods, require_methods
from titan_rl.rollout.environment.seats import Player, SeatedEnv, SeatOutError, TokenSeat
from titan_rl.rollout.environment.types import (
    MessageEnv,
    MessageObservation,
    MessageStep,
    TokenEnv,
    TokenObservation,
    TokenStep,
)
from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.types import Completion


class ShownTokenEnv:
    """A `TokenEnv`, turn by turn."""

    def __init__(self, env: TokenEnv, screen: Screen) -> None:
        self._env = env
        self._methods = EnvMethods(env)
        self._screen = screen

    @property
    def tools(self) -> Sequence[Mapping[str, object]] | None:
        """That the policy may call, where the environment has some."""
        return getattr(self._env, "tools", None)

    async def reset(self) -> TokenObservation:
        observation = await self._methods.call("reset", TokenObservation)
        self._screen.tools(self.tools)
        self._screen.messages(observation.messages)
        return observation

    async def step(self, completion: Completion) -> TokenStep:
        step = await self._methods.call("step", TokenStep, completion)
        self._screen.messages(step.messages)
        self._screen.rewards(step.rewards)
        return step

    async def close(self) -> None:
        await self._methods.close()


class ShownGame:
    """A `SeatedEnv`, seat by seat. One seat is asked at a time, since one person may play several."""

    def __init__(self, env: SeatedEnv, screen: Screen) -> None:
        self._env = env
        self._screen = screen
        self._turn = asyncio.Lock()

    def players(self, sibling: int) -> Mapping[str, Player]:
        return self._env.players(sibling)

    async def play_seats(self, seats: Mapping[str, TokenSeat]) -> None:
        shown = {name: _ShownSeat(seat, self._screen, self._turn) for name, seat in seats.items()}
        await self._env.play_seats(shown)
        for seat in shown.values():
            seat.show()

    async def close(self) -> None:
        await self._env.close()


class _ShownSeat:
    """A `TokenSeat` that shows its conversation before each answer, and the answer."""

    def __init__(self, seat: TokenSeat, screen: Screen, turn: asyncio.Lock) -> None:
        self._seat = seat
        self._screen = screen
        self._turn = turn
        self._unshown: list[Message] = []

    @property
    def name(self) -> str:
        return self._seat.name

    @property
    def player(self) -> Player:
        return self._seat.player

    async def generate(self, prompt_token_ids: Sequence[int]) -> Completion:
        async with self._turn:
            self._screen.has_shown = False  # what was shown is another seat's
            self.show()
            return await self._seat.generate(prompt_token_ids)

    async def reply(self, messages: Sequence[Message]) -> Message:
        return await self._seat.reply(messages)

    def leave(self, status: RolloutStatus, why: str) -> SeatOutError:
        return self._seat.leave(status, why)

    def record(self, messages: Sequence[Message]) -> None:
        self._seat.record(messages)
        self._unshown += messages

    def reward(self, name: str, value: float) -> None:
        self._seat.reward(name, value)
        self.show()
        self._screen.rewards({f"{name} of {self.name}": value})

    def show(self) -> None:
        """Show what was said since the last time."""
        if self._unshown:
            self._screen.say(f"--- seat {self.name}")
            self._screen.messages(self._unshown)
        self._unshown = []


class ShownMessageEnv:
    """A `MessageEnv`, turn by turn."""

    def __init__(self, env: MessageEnv, screen: Screen) -> None:
        require_methods(env)
        self._methods = EnvMethods(env)
        self._screen = screen

    async def reset(self) -> MessageObservation:
        observation = await self._methods.call("reset", MessageObservation)
        self._screen.tools(observation.tools)
        self._screen.messages(observation.messages)
        return observation

    async def step(self, message: Message) -> MessageStep:
        self._screen.messages([message])
        step = await self._methods.call("step", MessageStep, message)
        self._screen.messages(step.messages)
        self._screen.rewards(step.rewards)
        return step

    async def close(self) -> None:
        await self._methods.close()
