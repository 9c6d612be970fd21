"""Identity of a user's function, equal in every process that makes the same function.

    >>> from functools import partial
    >>> function_identity(partial(round, ndigits=1)) == function_identity(partial(round, ndigits=2))
    False

Standard library only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, MethodType
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
    if value is None or isinstance(value, str | bytes | int | float | PurePath):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    kind = _identity(type(value), 0)
    if isinstance(value, CodeType):
        return [value.co_code.hex(), value.co_names, *(_identity(each, MAX_DEPTH) for each in value.co_consts)]
    if isinstance(value, frozenset):
        return [kind, *sorted(map(repr, cast("frozenset[Any]", value)))]
    return [kind, *(_identity(each, depth - 1) for each in _bound(value))] if depth else kind


def _bound(value: Any) -> Iterable[Any]:
    """Values that a value consists of."""
    match value:
        case functools.partial():
            return cast("Any", value).func, cast("Any", value).args, cast("Any", value).keywords
        case MethodType():
            return value.__func__, value.__self__
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            name = f"{value.__module__}.{value.__qualname__}"
            return name, value.__code__, value.__defaults__, value.__kwdefaults__, *cells
        case list() | tuple():
            return cast("Sequence[Any]", value)
        case Mapping():
            return cast("Mapping[Any, Any]", value).items()
        case _:
            state: Any = object.__getstate__(value)  # attributes in __dict__, or a pair of these and those in __slots__
            parts = filter(None, cast("Sequence[Any]", state) if isinstance(state, tuple) else (state,))
            return [item for part in parts for item in part.items() if not isinstance(item[1], list | set)]
