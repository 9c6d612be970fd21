"""The controller's end of rollouts that run in other processes: their `GenerateFn` is a call to this actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, TypeVar

from monarch.actor import concurrent_endpoint

from titan_rl.cluster.processes.answers import AnsweringActor
from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.core.errors import RequestError
from titan_rl.generation.request import EngineRequest
from titan_rl.rollout.group.timed import generate_within
from titan_rl.rollout.types import Rollout
from titan_rl.types import Completion, GenerateFn

T = TypeVar("T")


_numbers = count()


class GroupHandler:
    """What one group in a worker may ask for while it runs. Lives on the event loop that made it.

    Attributes:
        key: what the worker calls it by. No other handler has it: a group that runs again has the same ids, and what a
            dead worker had sent may arrive when that has begun.
    """

    def __init__(self, group_id: str, generate: GenerateFn, on_finished: Callable[[Rollout], None] | None) -> None:
        self.key = f"{group_id}#{next(_numbers)}"
        self._closed = False
        self._generate = generate
        self._on_finished = on_finished
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Completion]] = set()

    async def generate(self, request: EngineRequest, time_left_s: float) -> tuple[Completion, float]:
        """From any event loop: have this one's loop generate, within the time that the rollout has left.

        Returns:
            The completion, and the seconds of the rollout's own that it took.

        Raises:
            RequestError: the handler is closed.
        """

        async def on_loop() -> tuple[Completion, float]:
            self._check_open()
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
            self._check_open()
            if self._on_finished is not None:
                self._on_finished(rollout)

        await self._run(on_loop())

    async def close(self) -> None:
        """Cancel what the group still asks for, and refuse what it asks for later. Called on the handler's own loop."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check_open(self) -> None:
        if self._closed:
            raise _unwanted(self.key)

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


_handlers: dict[str, GroupHandler] = {}  # by key; the actor lives in the process that fills it


@contextmanager
def handling(handler: GroupHandler) -> Generator[None]:
    """Within the block, workers reach `handler` through the service under its key."""
    _handlers[handler.key] = handler
    try:
        yield
    finally:
        del _handlers[handler.key]


def handler_of(key: str) -> GroupHandler:
    """The one that is reached under `key`.

    Raises:
        RequestError: there is none: the group has ended, or runs again in another worker.
    """
    if (handler := _handlers.get(key)) is None:
        raise _unwanted(key)
    return handler


def _unwanted(key: str) -> RequestError:
    return RequestError(f"group {key.rpartition('#')[0]!r} is no longer wanted of this worker")


_listeners: list[Callable[[str], object]] = []


@contextmanager
def listening(listener: Callable[[str], object]) -> Generator[None]:
    """Within the block, `listener` is called with what workers have to say, from any thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class GenerateService(AnsweringActor):
    """Spawned in the controller's own process."""

    @concurrent_endpoint
    async def generate(self, key: str, request: EngineRequest, time_left_s: float) -> tuple[Completion, float]:
        """As `GroupHandler.generate`."""
        return await handler_of(key).generate(request, time_left_s)

    @concurrent_endpoint
    async def say(self, text: str) -> None:
        """Something that people should read now."""
        for listener in _listeners:
            listener(text)

    @concurrent_endpoint
    async def finished(self, key: str, rollout: Rollout) -> None:
        await handler_of(key).finished(rollout)
