"""Reference of all settings: the keys of each table, with their types, defaults and meanings.

It is generated from the classes that check the settings, and from their docstrings, for the page in the docs, `titan-rl
settings` and the options of commands.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from titan_rl.config.function_names import function_name
from titan_rl.config.lora_experiments import AdapterRun
from titan_rl.config.run import RunConfig
from titan_rl.config.serve import ServerConfig
from titan_rl.config.tasks import TaskSource, ValidationSuite
from titan_rl.core.settings import FunctionName, Section

LISTS: dict[type[Section], str] = {
    TaskSource: "tasks",
    AdapterRun: "adapters",
    ValidationSuite: "validation.suites",
}
"""Names of the lists of tables, by the class of their tables."""

RUN = "run"
"""Name for the settings that are in no table."""

TASK = "Class of the task, as `module:Class`. Its fields are further keys of this table."


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """Description of one setting.

    Example: `SettingEntry("training.steps", "integer", "100", "Optimizer steps of the run.")`
    """

    key: str  # dotted
    kind: str
    default: str  # as TOML; "required", or empty for an optional setting
    about: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Description of one table.

    Attributes:
        name: Dotted name, or `RUN` for settings that are in no table.
        title: Header in TOML: `[training]`, `[[tasks]]`.
    """

    name: str
    title: str
    about: str
    settings: tuple[SettingEntry, ...]


def tables() -> list[TableEntry]:
    """Describe all tables of a run, and that of a server, in the order of their classes."""
    return [*tables_of(RunConfig), *_tables(ServerConfig, "server", "[server]", "server.")]


def tables_of(root: type[Section]) -> Iterator[TableEntry]:
    """Describe the tables of `RunConfig` or `ServeConfig`, in the order of their classes."""
    return _tables(root, RUN, "", "")


def _tables(section: type[Section], name: str, title: str, prefix: str) -> Iterator[TableEntry]:
    below: list[tuple[type[Section], str, str, str]] = []
    about_fields = field_docstrings(section)
    entries: list[SettingEntry] = []
    for field_name, field in section.model_fields.items():
        key, kind = f"{prefix}{field_name}", cast(Any, field.annotation)
        if isinstance(kind, type) and issubclass(kind, Section):
            below.append((kind, key, f"[{key}]", f"{key}."))
        elif get_origin(kind) is tuple and (inner := get_args(kind)[0]) in LISTS:
            table = LISTS[inner]
            below.append((inner, table, f"[[{table}]]", f"{table}.NAME."))
        elif field_name == "task" and section is TaskSource:
            entries.append(SettingEntry(f"{prefix}type", "name", "required", TASK))
        elif field_name == "curriculum":
            entries.append(SettingEntry(f"{key}.type", "name", "", about_fields[field_name]))
        else:
            about = about_fields.get(field_name, "")
            entries.append(setting_entry(key, field, about, function_name(section, field_name)))
    paragraph = (inspect.getdoc(section) or "").partition("\n\n")[0]
    about = "Settings that are in no table." if not prefix else _one_line(paragraph)
    yield TableEntry(name, title, about, tuple(entries))
    for inner in below:
        yield from _tables(*inner)


@cache
def field_docstrings(section: type[Section]) -> Mapping[str, str]:
    """Docstrings of the fields of a table, in one line each. They are read from the source when they are shown, because
    reading them takes longer than making the class."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if not issubclass(kind, Section):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    found[name] = _one_line(docstring)
                case _:
                    pass
    return found


def setting_entry(key: str, field: FieldInfo, about: str, function: FunctionName | None = None) -> SettingEntry:
    """Describe one field.

    Args:
        about: Docstring of the field.
        function: Annotation of the setting, if it names a function.
    """
    if field.is_required():
        default = "required"
    elif field.default_factory is not None or field.default is None:
        default = ""
    else:
        default = as_toml(field.default)
    if function:
        choices = ", ".join(f"`{one}`" for one in function.names)
        about = f"{about} One of {choices}, or your own as `module:function`.".strip()
        return SettingEntry(key, "name", default, about, function.names)
    kind = cast(Any, field.annotation)
    return SettingEntry(key, _kind(kind), default, about, get_args(kind) if get_origin(kind) is Literal else ())


def _kind(kind: Any) -> str:
    """Name of a type: `_kind(int | Literal["auto"])` is 'integer or "auto"'."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(map(as_toml, arguments))
    if origin is Annotated:
        return _kind(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_kind(one) for one in arguments if one is not NoneType))
    if origin in (tuple, list):
        return f"list of {_kind(arguments[0])}"
    if issubclass(origin or kind, Mapping | Section):
        return "table"
    names: dict[type, str] = {str: "text", bool: "true, false", int: "integer", float: "number"}
    return names.get(kind, str(kind.__name__))


@cache
def defaults() -> Mapping[str, str]:
    """Defaults of the settings of a run as TOML, by dotted names, such as "tasks.NAME.weight". Settings that are
    required, or whose default depends on others, are left out."""
    entries = (entry for table in tables_of(RunConfig) for entry in table.settings)
    return {entry.key: entry.default for entry in entries if entry.default not in ("", "required")}


def as_toml(value: Any) -> str:
    """Format a value in one line of TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value).items()
        return f"{{{', '.join(f'{name} = {as_toml(each)}' for name, each in entries)}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_toml, cast('Sequence[Any]', value)))}]"
    return str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
