"""The base of all settings: values that are checked when they are made, and never change."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Section(BaseModel):
    """Base of every table: frozen, strict about types, finite, and closed to unknown keys.

    An integer is fine where a float is asked for; nothing else is converted.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


@dataclass(frozen=True, slots=True)
class FunctionName:
    """Annotation of a setting that names a function: of the library by its name, or the user's as "module:function".

    Nothing is imported to check the setting itself; `load_config` then imports what is the user's.

    Args:
        arguments: what it is called with, by position. `load_config` refuses a function that does not take these, or is
            async. Nothing is said of it where there are none.
        may_be_class: it makes what the setting is about, so that a class does as well.

    Example: `loss: Annotated[str, FunctionName(("grpo", "gspo"), ("tokens", "clip"), may_be_class=False)] = "grpo"`
    """

    names: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    may_be_class: bool = True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value not in self.names and not all(value.partition(":")):
            about = {"names": f"one of {', '.join(self.names)}, or your own as " if self.names else ""}
            raise PydanticCustomError("function", 'must be {names}"module:function"', about)
        return value


@dataclass(frozen=True, slots=True)
class TakesEffect:
    """Condition under which a setting has an effect, declared in its annotation: another setting has a certain value.

    A run refuses a setting whose condition does not hold and whose value is not its default, see
    `titan_rl.config.conflicts`. The condition of a table holds for all settings in it.

    Args:
        setting: the other setting, or a property of its table, by its dotted name from the run's settings.
        one_of: values with which there is an effect; of a list, one item is enough.
        none_of: values without one, where any other will do.
        up_to: there is an effect up to the value of the other setting.
        without: says what is lacking, where the other's value does not say it to a user: "without hosts.provider".
        fix: what to do; by default made of the values.

    Example: `kl: Annotated[KLEstimate, TakesEffect("training.kl_coef", none_of=(0.0,))] = "k3"`
    """

    setting: str
    one_of: tuple[object, ...] = ()
    none_of: tuple[object, ...] = ()
    up_to: bool = False
    without: str = ""
    fix: str = ""

    def holds(self, value: Any, other: Any) -> bool:
        """
        Args:
            value: of the setting that this is declared for.
            other: of the other setting.
        """
        if self.up_to:
            return value is None or value <= other
        items: tuple[Any, ...] = cast("tuple[Any, ...]", other) if isinstance(other, tuple) else (other,)
        return any(item in self.one_of for item in items) if self.one_of else any(i not in self.none_of for i in items)


INNER = ""
"""Stands for all settings of a table within a table."""


MAX_NAME = 255
"""Largest number of bytes in one component of a path."""
MAX_PATH = 4095


def path_problem(path: str) -> str | None:
    """Why no file can have this path, for a message; None where one can."""
    if "\0" in path:
        return "has a NUL character, which no path may have"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "has half of a surrogate pair, which no path may have"
    longest = max(map(len, encoded.split(b"/")))
    if longest > MAX_NAME:
        return f"has a name of {longest} bytes, and file systems take {MAX_NAME}; shorten it"
    if len(encoded) > MAX_PATH:
        return f"has {len(encoded)} bytes, and file systems take {MAX_PATH}; shorten it"
    return None


def _possible(path: str) -> str:
    if "://" not in path and (problem := path_problem(path)) is not None:
        raise PydanticCustomError("path", "{problem}", {"problem": problem})
    return path


PathText = Annotated[str, AfterValidator(_possible)]
"""The path of a file or folder that need not be there."""


def _found(path: str, info: ValidationInfo) -> str:
    places: dict[str, list[Path]] = info.context["folders"] if info.context else {INNER: [Path()]}
    folders = places.get(info.field_name or INNER, places[INNER])
    for folder in folders:
        if (found := folder / os.path.expanduser(path)).exists():
            return str(found.resolve())
    return path


FilePath = Annotated[PathText, AfterValidator(_found)]
"""A file or folder, looked for in the current directory, then beside the TOML file that names it. The setting holds
what was found, and what was written where there is nothing: whoever opens it says so."""
