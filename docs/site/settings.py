"""Every setting of a run in Markdown: its type, default and what it is, of the classes that check it."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from titan_rl.config.functions import function_name
from titan_rl.config.run import RunConfig
from titan_rl.config.serve import ServerConfig
from titan_rl.config.tasks import TaskSource, ValidationSuite
from titan_rl.core.settings import FunctionName, Section

IN_LISTS = {"tasks": ("[[tasks]]", TaskSource), "suites": ("[[validation.suites]]", ValidationSuite)}

TASK = "The class, as `module:Class`. Its fields are further keys of this table."


def markdown() -> str:
    return "\n".join([*_table(RunConfig, "Of the run", ""), *_table(ServerConfig, "[server]", "server.")])


def _table(section: type[Section], title: str, prefix: str) -> Iterator[str]:
    below: list[tuple[type[Section], str, str]] = []
    shown = title if not title.startswith("[") else f"`{title}`"
    about = "" if section is RunConfig else " ".join((inspect.getdoc(section) or "").partition("\n\n")[0].split())
    yield f"\n## {shown}\n\n{about}\n\n| setting | type | default | |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        kind = typing.cast(Any, field.annotation)
        if isinstance(kind, type) and issubclass(kind, Section):
            below.append((kind, f"[{prefix}{name}]", f"{prefix}{name}."))
        elif name in IN_LISTS:
            table, of = IN_LISTS[name]
            below.append((of, table, f"{table.strip('[]')}.NAME."))
        elif name not in ("task", "curriculum"):
            yield _row(prefix + name, field, function_name(section, name))
        elif name == "curriculum":
            yield f"| `{prefix}curriculum` | table | | {_cell(field.description or '')} |"
        else:
            yield f"| `{prefix}type` | name | | {_cell(TASK)} |"
    for inner, table, key in below:
        yield from _table(inner, table, key)


def _row(name: str, field: FieldInfo, function: FunctionName | None) -> str:
    if field.is_required():
        default = "required"
    elif field.default_factory is not None or field.default is None:
        default = ""
    else:
        default = f"`{_toml(field.default)}`"
    kind = "name" if function is not None else _kind(typing.cast(Any, field.annotation))
    also = (
        f"One of {', '.join(f'`{one}`' for one in function.names)}, or your own as `module:function`."
        if function
        else ""
    )
    about = f"{field.description or ''} {also}"
    return f"| `{name}` | {kind} | {default} | {_cell(about)} |"


def _kind(kind: Any) -> str:
    """What a value is, in a word."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{_toml(one)}`" for one in arguments)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(one) for one in arguments if one is not type(None)))
    if origin in (tuple, list):
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "table"
    return {str: "text", bool: "true, false", int: "integer", float: "number"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, tuple | list) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
