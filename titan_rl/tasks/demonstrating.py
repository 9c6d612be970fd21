"""Demonstrations that are made by playing an environment, so that they are what a rollout of it would be."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from titan_rl.calls.threads import DaemonThreads
from titan_rl.calls.user_code import place_of
from titan_rl.errors import DataError, TitanRLError
from titan_rl.rollout.environment.methods import expected
from titan_rl.rollout.environment.types import MessageEnv, MessageObservation, MessageStep
from titan_rl.rollout.group.boundary import EndsWith, RolloutEnded
from titan_rl.rollout.group.env_calls import EnvCalls
from titan_rl.rollout.task import DEMONSTRATED_CALL_S, Demonstration
from titan_rl.rollout.types import Message, RolloutStatus

MOST_TURNS = 64
"""A player that has not come to an end by then never will."""

Player = Callable[[Sequence[Message]], str | Message]
"""What the assistant says to a conversation so far."""


def demonstrated(games: Iterable[tuple[MessageEnv, Player]]) -> Iterator[Demonstration]:
    """The conversations of environments with players, one after the other.

    They are played on one event loop, in a thread that ends with the iterator; the caller's loop may be running.

    Raises:
        DataError: one does not end, or a call of its environment or player fails or takes too long. Names the line.
    """
    limit_s = DEMONSTRATED_CALL_S.get()
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="demonstrations", daemon=True).start()
    try:
        for env, player in games:
            yield asyncio.run_coroutine_threadsafe(_Game(env, player, limit_s).play(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


class _Game:
    """One environment and who plays it."""

    def __init__(self, env: MessageEnv, player: Player, limit_s: float) -> None:
        self._calls = EnvCalls(env)  # pyright: ignore[reportArgumentType]  which calls any environment with a step
        self._player = player
        self._limit_s = limit_s

    async def play(self) -> Demonstration:
        try:
            return await self._play()
        except RolloutEnded as end:
            if isinstance(end.__cause__, TitanRLError):
                raise end.__cause__ from None
            raise DataError(f"a demonstration failed: {end.failure or end.error}") from end.__cause__
        finally:
            await self._calls.close(self._limit_s)

    async def _play(self) -> Demonstration:
        async with self._within():
            observation = expected(await self._calls.reset(), MessageObservation, self._calls.env, "reset")
        messages = list(observation.messages)
        for _ in range(MOST_TURNS):
            answer = await self._answer(messages)
            async with self._within():
                step = expected(await self._calls.step(answer), MessageStep, self._calls.env, "step")
            messages += [answer, *step.messages]
            if step.status is not None:
                return Demonstration(messages, observation.tools)
        raise DataError(f"a demonstration has not ended after {MOST_TURNS} turns: {messages[-4:]}")

    async def _answer(self, messages: Sequence[Message]) -> Message:
        async with self._within():
            said: Any = await DaemonThreads(1, "player").run(lambda: self._player(messages), self._limit_s)
            if inspect.isawaitable(said):
                said = await said
            if isinstance(said, str):
                return {"role": "assistant", "content": said}
            if not isinstance(said, Mapping):
                raise TypeError(f"the player of {place_of(self._player)} gave {said!r}; text or a message is expected")
        return cast("Message", said)

    def _within(self) -> EndsWith:
        return EndsWith(RolloutStatus.ERROR_ENV, asyncio.get_running_loop().time() + self._limit_s)
