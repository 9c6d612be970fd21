"""The list of all settings, made from the classes that check them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from titan_rl.config.functions import function_name
from titan_rl.config.run import RunConfig
from titan_rl.settings import FunctionName, Section


def reference() -> str:
    """Every table and setting with its default and its line of documentation.

    Example, some of its lines:

        [checkpoint]                 What is saved, and how often.
        checkpoint.interval = 0      Steps between checkpoints; 0 saves only at the end.
        checkpoint.keep = 2          Most checkpoints kept; the oldest goes first.
    """
    return "\n".join(_rows(RunConfig, ""))


def _rows(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        if name == "task":
            yield ""
            yield _row("[task]", "What is learned; see the docstring of the class for its settings.")
            yield _row("task.type", 'The task, "module:Class". Required.')
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield ""
            yield _row(f"[{key}]", inspect.getdoc(field.annotation) or "")
            yield from _rows(field.annotation, f"{key}.")
        else:
            yield _row(f"{key}{_default(field)}", " ".join(_words(field, function_name(section, name))))


def _words(field: FieldInfo, function: FunctionName | None) -> Iterator[str]:
    if field.description:
        yield field.description
    if function is not None:
        yield f'One of {", ".join(function.names)}, or your own as "module:function".'
    if get_origin(field.annotation) is Literal:
        yield f"One of {', '.join(get_args(field.annotation))}."
    if field.is_required():
        yield "Required."


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    return "" if field.is_required() or value is None else f" = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    return f'"{value}"' if isinstance(value, str) else str(value)


def _row(left: str, right: str) -> str:
    return f"{left:<40} {' '.join(right.split())}".rstrip()
