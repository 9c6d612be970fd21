"""Explanation of validation errors, in lines that name the setting, its value, its origin and the allowed values."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from titan_rl.config.peer_settings import peer_setting
from titan_rl.core.settings import dotted

COMMAND_LINE = "command line"
LONGEST_SHOWN = 120  # most characters of a value
ARGUMENTS = "arguments"
"""Origin of settings given in Python."""


@dataclass
class Origins:
    """Origin of each setting: a file, the command line, or the arguments of a call.

    Args:
        files: TOML files; later files override earlier ones.
    """

    files: tuple[Path, ...]
    _sources: dict[str, str] = field(default_factory=dict[str, str])  # by dotted name, in the order of setting

    def note(self, key: str, source: str) -> None:
        """Record that `source` has set `key` and everything below it."""
        for name in [name for name in self._sources if f"{name}.".startswith(f"{key}.")]:
            del self._sources[name]
        self._sources[key] = source

    def of(self, key: str) -> str:
        """Return the origin of `key`: that of `training.betas` for `training.betas[0]`, and that of `training.lr` for
        `training`."""
        above = [name for name in self._sources if f"{key}.".startswith((f"{name}.", f"{name}["))]
        below = [name for name in self._sources if name.startswith(f"{key}.")]
        if above or below:
            return self._sources[max(above, key=len) if above else below[-1]]
        return self.of_files()

    def below(self, key: str) -> list[str]:
        """List the settings in the table `key` that were set."""
        return [name for name in self._sources if name.startswith(f"{key}.")]

    def of_files(self) -> str:
        return " and ".join(map(str, self.files)) or "the defaults"

    def of_all(self) -> str:
        others = [f"the {other}" for other in (COMMAND_LINE, ARGUMENTS) if other in self._sources.values()]
        return " and ".join([self.of_files(), *others])

    def folders_for(self, key: str) -> list[Path]:
        """Return the folders in which the relative path of a setting is searched, in order: the current folder, and
        that of the file that sets it, or those of all files if the command line sets it."""
        named = [file for file in self.files if str(file) == self.of(key)]
        return [Path(), *(file.parent for file in named or reversed(self.files))]


def explain(
    error: ValidationError, root: type[BaseModel], origins: Origins, prefix: str = "", extra_names: Sequence[str] = ()
) -> str:
    """Explain a validation error, with one line for each wrong setting.

    Args:
        root: Class that was validated; its fields are the valid names.
        prefix: Dotted name of the table that `root` describes; empty for the whole file.
        extra_names: Further names that are valid in this table.

    Example: `cpu.toml: training.stepz = 5 is not a setting; nearest: training.steps`
    """
    return "\n".join(
        f"{origins.of_all() if key is None else origins.of(key)}: {text}"
        for key, text in problems(error, root, prefix, extra_names)
    )


def problems(
    error: ValidationError, root: type[BaseModel], prefix: str = "", extra_names: Sequence[str] = ()
) -> Iterator[tuple[str | None, str]]:
    """Iterate over the wrong settings in a validation error, each with its explanation; see `explain`. For a conflict
    between several settings, the setting is None."""
    for details in error.errors():
        key, given = _dotted(details["loc"], prefix), details["input"]
        message = details["msg"].replace("Input should be", "must be")
        match details["type"]:
            case "missing":
                kind = "table " if key in root.model_fields else ""  # at the top level, only tables are required
                yield key, f"{kind}{key} is missing"
            case "extra_forbidden":
                valid = [*settings(root, prefix), *(f"{prefix}.{name}" for name in extra_names)]
                yield from _unknown(key, given, valid, in_table=bool(prefix))
            case "value_error":  # raised by a validator of a section, whose message names the fields
                for line in message.removeprefix("Value error, ").splitlines():
                    yield None, f"{f'[{key}] ' if key else ''}{line}"
            case "model_type" | "model_attributes_type":
                yield key, f"{key} = {given!r} must be a table"
            case "tuple_type" | "list_type":
                values = [part.strip() for part in given.split(",")] if isinstance(given, str) else [given]
                shown = json.dumps(values, ensure_ascii=False, default=str)
                yield key, f"{key} = {given!r} must be a list; in brackets: {shown}"
            case "dict_type" | "mapping_type":
                value = json.dumps(given, ensure_ascii=False, default=str)
                yield key, f'{key} = {given!r} must be a table; in braces: {{ "NAME" = {value} }}'
            case "too_long":
                most = details.get("ctx", {})["max_length"]
                yield key, f"{key} = {given!r} has more than {most} items"
            case "too_short":
                yield key, f"{key} = {given!r} is empty"
            case _:
                value = repr(given)
                shown = value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]}..."
                yield key, f"{key} = {shown} {message}"


def settings(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Iterate over the dotted names of all settings and tables under `root`."""
    for name, info in root.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        yield key
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from settings(info.annotation, key)


def nearest(key: str, valid: Sequence[str]) -> str | None:
    """Find the most similar valid name: first among those with the same last part, then by the whole name, then by the
    last part. Return None if no name is similar."""
    leaf = key.rpartition(".")[2]
    same = [name for name in valid if name.rpartition(".")[2] == leaf]
    if close := difflib.get_close_matches(key, same, n=1) or difflib.get_close_matches(key, valid, n=1, cutoff=0.75):
        return close[0]
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(valid)}
    close = difflib.get_close_matches(leaf, list(by_leaf), n=1)
    return by_leaf[close[0]] if close else None


def _unknown(key: str, given: Any, valid: list[str], *, in_table: bool) -> Iterator[tuple[str, str]]:
    """Iterate over the explanations of an unknown setting, or of an unknown table with settings of another library.

    Args:
        valid: Names of all settings and tables.
        in_table: Whether they are all in one table. Then a name without a counterpart may be the user's own.
    """
    if not isinstance(given, dict):
        advice = _of_peers(key, valid, in_table=in_table) or _instead(key, valid)
        yield key, f"{key} = {given!r} is not a setting; {advice}"
        return
    tables = [name for name in valid if any(other.startswith(f"{name}.") for other in valid)]
    try:
        named = list(dotted(cast("dict[str, Any]", given)))
    except RecursionError:  # a name of thousands of parts
        named = []
    guess, unknown = nearest(key, tables), not named
    for name, value in named:
        misspelt_table = f"{guess}.{name}" in valid
        advice = None if misspelt_table else _of_peers(f"{key}.{name}", valid, in_table=in_table)
        unknown |= advice is None
        if advice:
            yield f"{key}.{name}", f"{key}.{name} = {value!r} is not a setting; {advice}"
    if unknown:
        yield key, f"[{key}] is not a table; {_instead(key, valid, tables)}"


def _of_peers(key: str, valid: list[str], *, in_table: bool) -> str | None:
    """Advice for a name of another library; None for other names."""
    found = peer_setting(key, valid)
    return None if found is None or (in_table and not found.setting) else found.advice


def _instead(key: str, valid: Sequence[str], alike: Sequence[str] | None = None) -> str:
    """Advice for an unknown name: the most similar one of `alike`, by default of `valid`, or all in the same table."""
    if guess := nearest(key, valid if alike is None else alike):
        return f"nearest: {guess}"
    table = key.rpartition(".")[0]
    return f"valid here: {', '.join(name for name in valid if name.rpartition('.')[0] == table)}"


def _dotted(loc: tuple[int | str, ...], prefix: str) -> str:
    """Join a location to a dotted name: `("training", "betas", 0)` is `training.betas[0]`. Parts in angle brackets,
    which stand for members of a union, are left out."""
    key = prefix
    for part in loc:
        if isinstance(part, str) and part.startswith("<"):
            continue
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            key += f".{part}" if key else part
    return key
