"""A coroutine with a callback at its end, whatever its task comes to."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any


class WithEndCallback(Coroutine[Any, Any, None]):
    """Runs `work`, and calls `on_end` once when it returns or raises.

    A task that is cancelled before its first turn throws into a coroutine that has not begun, where neither an `except`
    nor a `finally` of its body is reached. Here `on_end` is called all the same.
    """

    def __init__(self, work: Coroutine[Any, Any, None], on_end: Callable[[], object]) -> None:
        self._work = work
        self._on_end: Callable[[], object] | None = on_end

    def send(self, value: Any) -> Any:
        return self._go_on(lambda: self._work.send(value))

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        error: BaseException | object = None,
        traceback: TracebackType | None = None,
        /,
    ) -> Any:
        raised = kind if isinstance(kind, BaseException) else error if isinstance(error, BaseException) else kind()
        return self._go_on(lambda: self._work.throw(raised))

    def close(self) -> None:
        try:
            self._work.close()
        finally:
            self._end()

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield from self._work.__await__()
        finally:
            self._end()

    def _go_on(self, advance: Callable[[], Any]) -> Any:
        try:
            return advance()
        except BaseException:  # StopIteration, with which it returns, too
            self._end()
            raise

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
