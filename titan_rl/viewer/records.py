"""Lines of JSON as others wrote them. Python writes NaN and Infinity, which JSON lacks: they are read as null."""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec

from titan_rl.core.calls.plain import json_line, plain_json

_STRICT = msgspec.json.Decoder()


def read_json(text: bytes) -> dict[str, Any] | None:
    """The object; None where the text is none."""
    try:
        found = _STRICT.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        try:  # msgspec takes neither a NaN nor half of a surrogate pair
            found = plain_json(json.loads(text))
        except (ValueError, RecursionError):
            return None
    table = as_table(found)
    return table if isinstance(found, dict) else None


def as_table(value: object) -> dict[str, Any]:
    """What was read, where it is an object; else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """What was read, where it is a list; else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def strict_json(line: bytes) -> bytes:
    """A line of an object as JSON that every reader takes: as it is where it is so already.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        _STRICT.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json_line(json.loads(line.decode("utf-8", "replace"))).encode()
    return line
