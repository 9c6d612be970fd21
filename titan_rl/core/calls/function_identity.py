"""Identity of a user's function, equal in every process that makes the same function.

    >>> from functools import partial
    >>> function_identity(partial(round, ndigits=1)) == function_identity(partial(round, ndigits=2))
    False

Standard library only.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

MAX_DEPTH = 5
"""Levels of values within values that are compared. Deeper ones count by their types."""


def function_identity(function: object) -> Any:
    """JSON value that differs for functions that may return different results.

    This is the attribute `name` if it is text. Otherwise it comes from the code, and from the values that the function
    is bound to when this is called: its closure, defaults, arguments of a `partial`, and the attributes of its object.
    Attributes that are lists or sets are left out, because objects collect their calls in them.
    """
    name = getattr(function, "name", None)
    return name if isinstance(name, str) else _identity(function, MAX_DEPTH)


def function_name(function: object) -> str:
    """Name of a function for messages: its attribute `name`, or its `__qualname__`, or the name of its type."""
    name = getattr(function, "name", None)
    return name if isinstance(name, str) else getattr(function, "__qualname__", type(function).__name__)


def _identity(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, str | bytes | int | float | complex | enum.Enum | PurePath):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    kind = _identity(type(value), 0)
    if depth == 0:
        return kind

    def inside(each: Any) -> Any:
        return _identity(each, depth - 1)

    if isinstance(value, functools.partial):
        made = cast("functools.partial[Any]", value)
        return [kind, inside(made.func), *map(inside, made.args), inside(made.keywords)]
    if isinstance(value, MethodType):
        return [inside(value.__func__), inside(value.__self__)]
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        bound = [value.__defaults__, value.__kwdefaults__, *cells]
        return [value.__module__, value.__qualname__, _code(value.__code__), *map(inside, bound)]
    if isinstance(value, Mapping):
        return [kind, *([repr(key), inside(each)] for key, each in cast("Mapping[Any, Any]", value).items())]
    if isinstance(value, AbstractSet):
        return [kind, *sorted(map(repr, cast("AbstractSet[Any]", value)))]
    if isinstance(value, list | tuple):
        return [kind, *map(inside, cast("list[Any]", value))]
    kept = {name: each for name, each in _attributes(value).items() if not isinstance(each, list | AbstractSet)}
    return [kind, getattr(value, "__qualname__", ""), *inside(kept)]


def _attributes(value: object) -> dict[str, Any]:
    state: Any = object.__getstate__(value)
    parts = cast("tuple[Any, ...]", state if isinstance(state, tuple) else (state,))  # of __dict__, and of __slots__
    return {
        name: each for part in parts if isinstance(part, dict) for name, each in cast("dict[str, Any]", part).items()
    }


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: the variable has no value yet
        return None


def _code(code: CodeType) -> Any:
    constants = [_code(each) if isinstance(each, CodeType) else _identity(each, 2) for each in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]
