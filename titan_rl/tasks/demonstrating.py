"""Demonstrations that are made by playing an environment, so that they are what a rollout of it would be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from titan_rl.errors import DataError
from titan_rl.rollout.environment.types import MessageEnv
from titan_rl.rollout.task import Demonstration
from titan_rl.rollout.types import Message

MOST_TURNS = 64
"""A player that has not come to an end by then never will."""

AT_ONCE = 256
"""Demonstrations for which an event loop is made."""

Player = Callable[[Sequence[Message]], str | Message]
"""What the assistant says to a conversation so far."""

T = TypeVar("T")


def demonstrated(games: Iterable[tuple[MessageEnv, Player]]) -> Iterator[Demonstration]:
    """The conversations of environments with players, one after the other.

    Raises:
        DataError: one does not end.
    """
    rest = iter(games)
    while some := list(islice(rest, AT_ONCE)):
        yield from _run(_play_all(some))


async def _play_all(games: Sequence[tuple[MessageEnv, Player]]) -> list[Demonstration]:
    return [await _play(env, player) for env, player in games]


async def _play(env: MessageEnv, player: Player) -> Demonstration:
    try:
        observation = await env.reset()
        messages = list(observation.messages)
        for _ in range(MOST_TURNS):
            said = player(messages)
            answer: Message = {"role": "assistant", "content": said} if isinstance(said, str) else said
            step = await env.step(answer)
            messages += [answer, *step.messages]
            if step.status is not None:
                return Demonstration(messages, observation.tools)
    finally:
        await env.close()
    raise DataError(f"a demonstration has not ended after {MOST_TURNS} turns: {messages[-4:]}")


def _run(work: Coroutine[Any, Any, T]) -> T:
    """In a thread with an event loop of its own, for the caller's may be running."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
