"""The controller's end of rollouts that run in other processes: their `GenerateFn` is a call to this actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint

from titan_rl.calls.stopwatch import Stopwatch
from titan_rl.errors import RequestError
from titan_rl.generation.request import EngineRequest
from titan_rl.rollout.group.timed import generate_within
from titan_rl.rollout.types import Rollout
from titan_rl.types import Completion, GenerateFn

T = TypeVar("T")


class GroupHandler:
    """What one group in a worker may ask for while it runs. Lives on the event loop that made it."""

    def __init__(self, generate: GenerateFn, on_finished: Callable[[Rollout], None] | None) -> None:
        self._generate = generate
        self._on_finished = on_finished
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Completion]] = set()

    async def generate(self, request: EngineRequest, time_left_s: float) -> tuple[Completion, float]:
        """From any event loop: have this one's loop generate, within the time that the rollout has left.

        Returns:
            The completion, and the seconds of the rollout's own that it took.
        """

        async def on_loop() -> tuple[Completion, float]:
            watch = Stopwatch(time_left_s)
            task = asyncio.ensure_future(request.sent_to(partial(generate_within, watch, self._generate)))
            self._tasks.add(task)
            try:
                return await task, watch.used_s
            finally:
                self._tasks.discard(task)

        return await self._run(on_loop())

    async def finished(self, rollout: Rollout) -> None:
        async def on_loop() -> None:
            if self._on_finished is not None:
                self._on_finished(rollout)

        await self._run(on_loop())

    async def close(self) -> None:
        """Cancel what the group still asks for. Called on the handler's own loop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


_handlers: dict[str, GroupHandler] = {}  # by group id; the actor lives in the process that fills it


@contextmanager
def handling(group_id: str, handler: GroupHandler) -> Generator[None]:
    """Within the block, workers reach `handler` through the service under `group_id`."""
    assert group_id not in _handlers, f"group {group_id!r} runs already"
    _handlers[group_id] = handler
    try:
        yield
    finally:
        del _handlers[group_id]


_listeners: list[Callable[[str], object]] = []


@contextmanager
def listening(listener: Callable[[str], object]) -> Generator[None]:
    """Within the block, `listener` is called with what workers have to say, from any thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class GenerateService(Actor):
    """Spawned in the controller's own process."""

    @concurrent_endpoint
    async def generate(self, group_id: str, request: EngineRequest, time_left_s: float) -> tuple[Completion, float]:
        """As `GroupHandler.generate`."""
        return await _handler_of(group_id).generate(request, time_left_s)

    @concurrent_endpoint
    async def say(self, text: str) -> None:
        """Something that people should read now."""
        for listener in _listeners:
            listener(text)

    @concurrent_endpoint
    async def finished(self, group_id: str, rollout: Rollout) -> None:
        await _handler_of(group_id).finished(rollout)


def _handler_of(group_id: str) -> GroupHandler:
    if (handler := _handlers.get(group_id)) is None:
        raise RequestError(f"group {group_id!r} is no longer wanted")
    return handler
