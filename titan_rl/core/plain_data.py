"""Conversion of output of policies and environments to plain data that can be copied, stored and read back.

A tool call may contain an integer of thirty digits or half of a surrogate pair, and an environment's message any
object, or itself. None of this is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, cast

MAX_DEPTH = 100
"""Levels of nesting; deeper values are kept as text."""

MAX_JSON_BITS = 14_000
"""Largest integer in JSON; Python reads no more than 4300 digits back."""


def snapshot(value: Any) -> Any:
    """A copy that shares no dictionary, list or tuple with `value`. Other objects are shared, as are values deeper than
    `MAX_DEPTH` levels and containers that contain themselves."""
    return _snapshot(value, [])


def _snapshot(value: Any, inside: list[int]) -> Any:
    if isinstance(value, str):  # most values; the check of an abstract class takes longer
        return value
    if not isinstance(value, Mapping | list | tuple) or id(cast(Any, value)) in inside or len(inside) == MAX_DEPTH:
        return cast(Any, value)
    container = cast(Any, value)
    inside.append(id(container))
    if isinstance(value, Mapping):
        copy = {key: _snapshot(item, inside) for key, item in container.items()}
    else:
        items = [_snapshot(item, inside) for item in container]
        copy = items if isinstance(value, list) else tuple(items)
    inside.pop()
    return copy


def plain(value: Any) -> Any:
    """Convert to None, bool, int, float, str, bytes, lists, and dictionaries with keys of text.

    Tuples, sets and arrays become lists. Keys and all other objects become their `repr`, and so does a container
    inside itself.

    >>> plain({"a": (1, {2.5}), 3: b"x"})
    {'a': [1, [2.5]], '3': b'x'}
    """
    return _Plain(for_json=False).of(value)


def plain_json(value: Any) -> Any:
    """Plain data for JSON, like `plain`: a NaN or an infinity becomes None, bytes and other objects become their `str`,
    and an integer too long to be read back its hexadecimal digits."""
    return _Plain(for_json=True).of(value)


def json_line(value: Any) -> str:
    r"""`plain_json(value)` as one line of JSON that UTF-8 can encode. Python reads it back equal.

    >>> json_line({"content": "\ud83d", "score": float("nan")})
    '{"content": "\\ud83d", "score": null}'
    """
    line = json.dumps(plain_json(value), ensure_ascii=False, allow_nan=False)
    return line if line.isascii() else _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):x}", line)


def safe_text(value: Any) -> str:
    """`str(value)`, or the name of its type if that raises."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose text raises {type(error).__name__}>"


def safe_repr(value: Any) -> str:
    """`repr(value)`, or the name of its type if that raises."""
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose text raises {type(error).__name__}>"


def printable(text: str) -> str:
    r"""Text with lone surrogates as escapes, so that UTF-8 can encode it.

    >>> printable("\ud83d!")
    '\\ud83d!'
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def terminal_text(text: str) -> str:
    r"""Text from outside the program, safe to write to a terminal.

    Characters that could move the cursor, colour or hide text, or reorder it (control characters, bidirectional
    overrides) become an escape such as `\u001b`, which JSON and TOML read back. Line breaks and tabs stay.

    >>> terminal_text("\x1b[2J gone")
    '\\u001b[2J gone'
    """
    return text if text.isprintable() else _COMMANDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _is_plain(items: list[Any]) -> bool:
    """Whether a list has only small integers, finite floats, or strings and booleans. Lists of tokens do, and
    converting each item in Python would take as long as the rest of their line."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return min(items) >= -_SMALL and max(items) <= _SMALL
    return kinds <= {str, bool} or (kinds == {float} and all(map(math.isfinite, items)))


_SMALL = 1 << 62
_SURROGATE = re.compile("[\ud800-\udfff]")
_COMMANDS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)


class _Plain:
    def __init__(self, *, for_json: bool) -> None:
        self._for_json = for_json
        self._text = safe_text if for_json else safe_repr
        self._inside: list[int] = []  # ids of the containers around the current value

    def of(self, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            number = int.__int__(value)
            return hex(number) if self._for_json and number.bit_length() > MAX_JSON_BITS else number
        if isinstance(value, float):
            number = float.__float__(value)
            return None if self._for_json and not math.isfinite(number) else number
        if isinstance(value, bytes | bytearray | memoryview):
            data = bytes(cast(Any, value))
            return str(data) if self._for_json else data
        if isinstance(value, Mapping | list | tuple | AbstractSet) or hasattr(value, "tolist"):
            return self._container(value)
        return self._text(value)

    def _container(self, value: Any) -> Any:
        if id(value) in self._inside or len(self._inside) == MAX_DEPTH:
            return self._text(value)
        self._inside.append(id(value))
        try:
            if isinstance(value, Mapping):
                items = list(cast("Mapping[Any, Any]", value).items())
                return {self._key(key): self.of(item) for key, item in items}
            if type(value) is list and _is_plain(cast("list[Any]", value)):
                return cast("list[Any]", value).copy()
            if isinstance(value, list | tuple | AbstractSet):
                return [self.of(item) for item in cast("list[Any]", value)]
            return self.of(value.tolist())
        except Exception:  # an object that only looks like a container
            return self._text(value)
        finally:
            self._inside.pop()

    def _key(self, key: Any) -> str:
        return str.__str__(key) if isinstance(key, str) else self._text(key)
