"""Calls of the methods of an environment of the user's, whether they are coroutines or plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from titan_rl.core.calls.user_code import place_of
from titan_rl.rollout.environment.threaded import CallsInThread, ThreadedEnv, in_env_thread

T = TypeVar("T")


class EnvMethods:
    """The methods of one environment.

    A coroutine method runs on the event loop. A plain one runs in a thread of the environment's own, so that it holds
    up no other rollout and a time limit has an effect on it; what it returns is awaited if it can be. Inside a
    `ThreadedEnv` all run in the thread that is there.

    Example:

        methods = EnvMethods(env)
        observation = await methods.call("reset", MessageObservation)
        step = await methods.call("step", MessageStep, message)
        await methods.close()
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._calls: CallsInThread | None = None

    async def call(self, name: str, kind: type[T], *arguments: Any) -> T:
        """What a method gives.

        Raises:
            TypeError: it gave something else than a `kind`. Names the method's line, what it gave, and `kind`.
        """
        return expected(await self.result(name, *arguments), kind, self.env, name)

    async def result(self, name: str, *arguments: Any) -> Any:
        """What a method gives, of any type."""
        method = getattr(self.env, name)
        if not self._runs_in_thread(method):
            return await _awaited(method(*arguments))
        if self._calls is None:
            self._calls = CallsInThread(awaits=False)
        return await _awaited(await self._calls.run(lambda: method(*arguments)))

    async def close(self) -> None:
        """Close the environment, and end its thread. Returns at once where an abandoned call is still at work in that;
        a plain `close` follows it."""
        method = self.env.close
        try:
            if self._runs_in_thread(method):
                self._calls = self._calls or CallsInThread(awaits=False)
                await _awaited(await self._calls.end_with(method))
            else:
                await _awaited(method())
        finally:
            if self._calls is not None:
                self._calls.end()

    def _runs_in_thread(self, method: Callable[..., Any]) -> bool:
        return not (is_coroutine_method(method) or in_env_thread())


def is_coroutine_method(method: Any) -> bool:
    """Whether calling it surely gives something to await, and only begins work on the event loop."""
    call: Any = inspect.getattr_static(method, "__call__", None)  # async, of an object that is called like a function
    return inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(call)


def require_methods(env: object) -> None:
    """Check that an environment has the methods of a `MessageEnv`.

    Raises:
        TypeError: "SortEnv has no method close; an environment has three: reset, step and close".
    """
    for name in ("reset", "step", "close"):
        if not callable(getattr(env, name, None)):
            kind = "None" if env is None else type(env).__name__
            raise TypeError(f"{kind} has no method {name}; an environment has three: reset, step and close")


def expected(given: Any, kind: type[T], env: object, name: str) -> T:
    """`given`, which a method of an environment has returned.

    Raises:
        TypeError: it is no `kind`: "step of task.py:31 gave a float; a MessageStep is expected".
    """
    if isinstance(given, kind):
        return given
    while isinstance(env, ThreadedEnv):
        env = env.made
    method: Any = getattr(env, name, None)
    place = None if method is None else place_of(method)
    whose = f"{name} of {type(env).__name__}" if place is None else f"{name} of {place.partition(' in ')[0]}"
    raise TypeError(f"{whose} gave {_kind_of(given)}; {_with_article(kind.__name__)} is expected")


def _kind_of(given: Any) -> str:
    return "None" if given is None else _with_article(type(given).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer
