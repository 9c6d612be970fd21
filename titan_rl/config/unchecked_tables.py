"""Unchecked tables of settings, which are read from TOML files and overridden by options and arguments."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import ValidationError

from titan_rl.config.tasks import tables_by_name
from titan_rl.config.validation_errors import ARGUMENTS, COMMAND_LINE, Origins, explain
from titan_rl.core.calls.parsing import parse_toml
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section

Tables = dict[str, Any]


def read_tables(paths: Sequence[Path], overrides: Sequence[tuple[str, str]]) -> tuple[Tables, Origins]:
    """Read and merge TOML files: later files override earlier ones, and `overrides` override all files. Tables are
    merged, those of `[[...]]` by their names; any other value, including a list, is replaced as a whole.

    Args:
        overrides: Dotted settings and their values.

    Raises:
        ConfigError: A file cannot be read or is not valid TOML, or an override is below a setting that is not a table.
    """
    tables, origins = Tables(), Origins(tuple(paths))
    for path in paths:
        _merge(tables, _read_toml(path), origins, str(path))
    override(tables, overrides, origins)
    return tables, origins


def override(tables: Tables, overrides: Sequence[tuple[str, str]], origins: Origins) -> None:
    """Set dotted settings in place, and note their origin.

    Raises:
        ConfigError: A setting is below one that is not a table.
    """
    for key, text in overrides:
        _override(tables, key, parse_value(text), f"{COMMAND_LINE}: --{key}")
        origins.note(key, COMMAND_LINE)


def give(tables: Tables, given: Mapping[str, object], origins: Origins) -> None:
    """Override settings with Python values; see `override`.

    Raises:
        ConfigError: A setting is below one that is not a table.
    """
    for key, value in given.items():
        _override(tables, key, value, f"{ARGUMENTS}: {key}")
        origins.note(key, ARGUMENTS)


def _read_toml(path: Path) -> Tables:
    try:
        tables = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = sorted(str(other) for other in path.parent.glob("*.toml"))
        hint = f"; that folder has {', '.join(found)}" if found else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except IsADirectoryError:
        found = sorted(str(other) for other in path.glob("*.toml"))
        raise ConfigError(f"{path} is a folder; name a TOML file{f' in it: {found[0]}' if found else ''}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a TOML file that you may read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    lists = (
        (tables, "tasks", "tasks"),
        (tables, "adapters", "adapters"),
        (tables.get("validation"), "suites", "validation.suites"),
    )
    for table, key, name in lists:
        if isinstance(table, dict) and key in table:
            table[key] = tables_by_name(name, table[key], path)
    return tables


def _merge(tables: Tables, more: Tables, origins: Origins, source: str, prefix: str = "") -> None:
    for name, value in more.items():
        key, before = f"{prefix}{name}", tables.get(name)
        if isinstance(value, dict) and (before is None or isinstance(before, dict)):
            below = cast("Tables", tables.setdefault(name, {}))
            _merge(below, cast("Tables", value), origins, source, f"{key}.")
            if not below:
                origins.note(key, source)
        else:
            tables[name] = value
            origins.note(key, source)


def _override(tables: Tables, key: str, value: object, about: str) -> None:
    """Set the dotted `key` in place, and create missing tables on its path."""
    # No file can hold half of a surrogate pair, to which a byte of an argument that is not UTF-8 is decoded, too.
    if _HALF_SURROGATE.search(ascii((key, value))):
        raise ConfigError(
            f"{ascii(about)[1:-1]} = {value!a} has half of a surrogate pair, which no path may have, and no file"
        )
    *parents, name = key.split(".")
    table = tables
    for depth, parent in enumerate(parents, start=1):
        child = table.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{about}: {'.'.join(parents[:depth])} is a setting, not a table")
        table = cast("Tables", child)
    table[name] = value


def parse_value(text: str) -> Any:
    """Parse text as a TOML value, such as `3` or `[0.9, 0.99]`; other text, such as `cosine`, is a string."""
    try:
        parsed = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in `text` could add further keys; then the text is not a single value.
    return parsed["value"] if len(parsed) == 1 else text


def fields_of(table: Any, name: str, origins: Origins) -> dict[str, Any]:
    """Copy the table with this dotted name.

    Raises:
        ConfigError: It is another value.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{origins.of(name)}: {name} = {table!r} must be a table")
    return dict(cast("dict[str, Any]", table))


S = TypeVar("S", bound=Section)


def validated(
    section: type[S], table: Mapping[str, Any], origins: Origins, prefix: str = "", extra_names: Sequence[str] = ()
) -> S:
    """Validate the table of a section.

    Args:
        prefix: Dotted name of the table; empty for the whole file.
        extra_names: Further names that are valid in this table, for advice.

    Raises:
        ConfigError: A setting is wrong; see `explain`.
    """
    try:
        return section.model_validate(without_unset(section, table))
    except ValidationError as error:
        raise ConfigError(explain(error, section, origins, prefix, extra_names)) from None


_HALF_SURROGATE = re.compile(r"(?<!\\)(\\\\)*\\ud[89a-f]")
"""Half of a surrogate pair, in the text of `ascii`, in which two backslashes stand for one."""

UNSET = "none"
"""Value that resets an optional setting to its default: `--sampling.seeded none`, or `seeded = "none"`."""


def without_unset(section: type[Section], table: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a table of `section` with None for optional settings that are `UNSET`, including those of nested tables.

    If "none" is an allowed value of a setting, it is kept.
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
    """Yield the members of a union, which may be nested or annotated: `int | Literal["auto"] | None` has three."""
    match get_origin(annotation):
        case origin if origin is Annotated:
            yield from _alternatives(get_args(annotation)[0])
        case origin if origin is Union or origin is UnionType:
            for argument in get_args(annotation):
                yield from _alternatives(argument)
        case _:
            yield annotation
