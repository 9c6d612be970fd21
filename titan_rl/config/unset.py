"""Optional settings that are to have no value, for which TOML has no word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from titan_rl.core.settings import Section

UNSET = "none"
"""What an optional setting is set to for what it is by default: `--sampling.seeded none`, and `seeded = "none"`."""


def without_unset(section: type[Section], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of `section` with None where an optional setting is `UNSET`, also in the tables below it.

    Where "none" is one of the words that a setting may be, it stays.
    """
    return {name: _value(section, name, value) for name, value in table.items()}


def _value(section: type[Section], name: str, value: Any) -> Any:
    field = section.model_fields.get(name)
    if field is None:
        return value
    kinds = list(_alternatives(field.annotation))
    if value == UNSET:
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        return None if NoneType in kinds and UNSET not in words else value
    below = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
    return without_unset(below, cast("Mapping[str, Any]", value)) if below and isinstance(value, Mapping) else value


def _alternatives(annotation: object) -> Iterator[object]:
    """`int | Literal["auto"] | None` has three, however they are nested and annotated."""
    match get_origin(annotation):
        case origin if origin is Annotated:
            yield from _alternatives(get_args(annotation)[0])
        case origin if origin is Union or origin is UnionType:
            for argument in get_args(annotation):
                yield from _alternatives(argument)
        case _:
            yield annotation
