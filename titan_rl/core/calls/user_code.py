"""Exceptions of user code: their texts, and the lines of that code that they come from.

Standard library only.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar, cast

from titan_rl.core.errors import TitanRLError
from titan_rl.core.plain_data import terminal_text

ErrorT = TypeVar("ErrorT", bound=Exception)

_OWN = str(Path(__file__).parents[2])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MAX_TRACEBACK = 16_000  # characters kept


@dataclass(frozen=True, slots=True)
class Failure:
    """Record of an exception, for people to read and programs to count. It outlives the exception's process.

    Example: `Failure("KeyError: 'answer'", "env.py:17 in step", "Traceback (most recent call last): ...")`
    """

    error: str  # "KeyError: 'answer'"
    where: str | None  # innermost line of the user's code, "env.py:17 in step"; None if no line was found
    traceback: str

    @classmethod
    def of(cls, error: BaseException, text: str | None = None) -> Failure:
        """Record an exception.

        Args:
            text: Replaces the exception's own type and text.
        """
        lines = terminal_text("".join(traceback.format_exception(error)))
        return cls(text or summary(error), where(error), lines[-_MAX_TRACEBACK:])

    @property
    def kind(self) -> str:
        """Key for counting: equal for exceptions of one type from one line, such as "KeyError at env.py:17 in step"."""
        name = self.error.partition(":")[0]
        return f"{name} at {self.where}" if self.where else name

    def __str__(self) -> str:
        return f"{self.error} ({self.where})" if self.where else self.error


def describe(error: BaseException) -> str:
    """Type, text and place of an exception: `KeyError: 'answer' (env.py:17 in step)`."""
    location = where(error)
    return summary(error) + (f" ({location})" if location else "")


def is_async(function: object) -> bool:
    """Whether a function, or an object that is called like one, is a coroutine function."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    call: Any = inspect.getattr_static(function, "__call__", None)
    return inspect.iscoroutinefunction(call)


def summary(error: BaseException) -> str:
    """Type and text of an exception, `KeyError: 'answer'`; only the type if the text is empty. Handles errors whose
    `str` raises."""
    kind = type(error).__name__
    try:
        text = terminal_text(str(error))
    except BaseException as broken:  # including SystemExit, which must not end the program here
        text = f"(its text cannot be read: {type(broken).__name__})"
    return f"{kind}: {text}" if text.strip() else kind


def reason(error: BaseException) -> str:
    """Reason of a failure, for a message that names the failed part; never empty. Errors of titan_rl are given by their
    text, others by type and text."""
    own = str(error) if isinstance(error, TitanRLError) else ""
    return own if own.strip() else summary(error)


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, followed by its explicit causes and the members of groups, the nearest first."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting[:0] = cast("BaseExceptionGroup[Any]", one).exceptions
        if one.__cause__ is not None:
            waiting.append(one.__cause__)


def where(error: BaseException) -> str | None:
    """The innermost line of user code in an exception's traceback, as `env.py:17 in step`.

    User code is neither in titan_rl nor in an installed package. If the traceback contains no user code, as after a
    time limit, the tracebacks of the exception's causes are searched.

    The path is relative to the current directory if the file is below it.
    """
    for one in _chain(error):
        location = innermost(traceback.extract_tb(one.__traceback__)) or getattr(one, _LOCATION_ATTRIBUTE, None)
        if location is not None:
            return location
    return None


def record_location(error: BaseException, location: str | None) -> None:
    """Record the line at which a call was abandoned, for `where`: the traceback has no line of user code."""
    if location is not None:
        setattr(error, _LOCATION_ATTRIBUTE, location)


def thread_location(thread_id: int | None) -> str | None:
    """The innermost line of user code that a thread is executing."""
    frame = None if thread_id is None else sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]
    return None if frame is None else innermost(traceback.extract_stack(frame))


def task_location(task: asyncio.Task[Any]) -> str | None:
    """The innermost line of user code at which a task is waiting."""
    frames: list[traceback.FrameSummary] = []
    waits: Any = task.get_coro()
    while waits is not None:
        if (frame := _first(waits, "cr_frame", "gi_frame", "ag_frame")) is not None:
            frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        waits = _first(waits, "cr_await", "gi_yieldfrom", "ag_await")
    return innermost(frames)


def _first(owner: Any, *names: str) -> Any:
    """The first of the named attributes that is not None; None if all are."""
    return next((found for name in names if (found := getattr(owner, name, None)) is not None), None)


def with_cause(error: ErrorT, cause: BaseException | None) -> ErrorT:
    """`error` with its cause set, as by `raise error from cause`."""
    error.__cause__ = cause
    return error


def innermost(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """The last of these frames that is user code, as `env.py:17 in step`."""
    for frame in reversed(frames):
        if not _is_library(frame.filename):
            return f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"
    return None


def callers(frames: Sequence[traceback.FrameSummary]) -> Iterator[tuple[str, str]]:
    """Functions of titan_rl that called the innermost line of user code, the nearest first: module and function, such
    as `("rollout/group/user_code_boundary.py", "make")`. Empty without user code."""
    is_below = False
    for frame in reversed(frames):
        if is_below and frame.filename.startswith(_OWN + os.sep):
            yield Path(frame.filename).relative_to(_OWN).as_posix(), frame.name
        is_below = is_below or not _is_library(frame.filename)


_LOCATION_ATTRIBUTE = "_titan_rl_location"


def source_location(function: Callable[..., object]) -> str | None:
    """Place of a function's definition, as `env.py:17 in step`; None for one that is not written in Python.

    Used for errors without a line of user code, such as that of a function that hangs.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    for one in (function, inspect.getattr_static(function, "__call__", None)):
        if isinstance(code := getattr(one, "__code__", None), CodeType):
            return f"{_short(code.co_filename)}:{code.co_firstlineno} in {code.co_name}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, followed by its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        implicit = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or implicit


def _is_library(filename: str) -> bool:
    return filename.startswith("<") or any(
        filename.startswith(folder + os.sep) for folder in (_OWN, *_LIBRARIES) if folder
    )


def _short(filename: str) -> str:
    try:
        path, current = Path(filename), Path.cwd()
    except OSError:  # the current directory is gone
        return filename
    return str(path.relative_to(current)) if path.is_relative_to(current) else filename
