"""Demonstrations that are made by playing an environment, so that they are what a rollout of it would be."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, cast

from titan_rl.core.calls.bounded import OutOfTimeError, bounded
from titan_rl.core.calls.threads import DaemonThreads
from titan_rl.core.calls.user_code import Failure, place_of, thread_place
from titan_rl.core.errors import DataError, TitanRLError
from titan_rl.rollout.environment.threaded import expected
from titan_rl.rollout.environment.types import MessageEnv, MessageObservation, MessageStep
from titan_rl.rollout.group.boundary import EndsWith, EnvCalls, RolloutEnded
from titan_rl.rollout.task import DEMONSTRATED_CALL_S, Demonstration
from titan_rl.rollout.types import Message, RolloutStatus

MOST_TURNS = 64
"""A player that has not come to an end by then never will."""

GRACE_S = 5.0
"""Time for the event loop to end a call that is past its limit. A loop that has not by then is blocked."""

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
    thread = threading.Thread(target=_run, args=(loop,), name="demonstrations", daemon=True)
    thread.start()
    try:
        for env, player in games:
            game = _Game(env, player, limit_s)
            yield game.result(asyncio.run_coroutine_threadsafe(game.play(), loop), thread)
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
        self._ends_by = time.monotonic() + limit_s  # the current call

    def result(self, playing: Future[Demonstration], thread: threading.Thread) -> Demonstration:
        """Wait for the demonstration, from another thread than that of its event loop.

        A call that blocks the event loop also blocks the timer that limits it, so the limit is checked here as well.
        """
        while not wait([playing], max(0.0, self._ends_by + GRACE_S - time.monotonic())).done:
            if time.monotonic() >= self._ends_by + GRACE_S:
                raise DataError(
                    f"a demonstration failed: the environment took longer than {self._limit_s:g} s: "
                    f"{thread_place(thread.ident)} blocks the event loop; await there, or make it a plain method"
                )
        return playing.result()

    async def play(self) -> Demonstration:
        try:
            played = await self._play()
        except RolloutEnded as end:
            await self._close()
            if isinstance(end.__cause__, TitanRLError):
                raise end.__cause__ from None
            raise DataError(f"a demonstration failed: {end.failure or end.error}") from end.__cause__
        except BaseException:
            await self._close()
            raise
        if (wrong := await self._close()) is not None:  # else thousands more would take as long
            raise DataError(f"a demonstration failed: closing {type(self._calls.env).__name__}: {wrong}")
        return played

    async def _close(self) -> Failure | None:
        self._ends_by = time.monotonic() + self._limit_s
        return await self._calls.close(self._limit_s)

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
        async with EndsWith(RolloutStatus.ERROR_ENV):
            self._ends_by = time.monotonic() + self._limit_s
            try:
                said: Any = await DaemonThreads(1, "player").run(lambda: self._player(messages), self._limit_s)
                if inspect.isawaitable(said):
                    self._ends_by = time.monotonic() + self._limit_s
                    said = await bounded(said, self._limit_s, "the player")
            except OutOfTimeError as error:
                raise OutOfTimeError("the player took longer than env_timeout_s") from error
            if isinstance(said, str):
                return {"role": "assistant", "content": said}
            if not isinstance(said, Mapping):
                raise TypeError(f"the player of {place_of(self._player)} gave {said!r}; text or a message is expected")
        return cast("Message", said)

    def _within(self) -> EndsWith:
        self._ends_by = time.monotonic() + self._limit_s
        return EndsWith(RolloutStatus.ERROR_ENV, asyncio.get_running_loop().time() + self._limit_s)
