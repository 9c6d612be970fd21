"""Base class of settings: immutable values that are validated when they are made."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Section(BaseModel):
    """Base class of every table: frozen, strict about types, finite, and closed to unknown keys.

    Integers are accepted for floats; nothing else is converted.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
    )


S = TypeVar("S", bound=Section)


def with_value(section: S, setting: str, value: Any) -> S:
    """Copy a table with another value of one setting, which is not validated.

    Args:
        setting: Dotted name: "model.path" for a setting of a table within this one.
    """
    name, _, below = setting.partition(".")
    return section.model_copy(update={name: with_value(getattr(section, name), below, value) if below else value})


def refusal(message: str) -> PydanticCustomError:
    """Make the error of a validator of one setting.

    Args:
        message: Text after the setting and its value: "must be ...".
    """
    return PydanticCustomError("setting", "{message}", {"message": message})


def matching(pattern: str, message: str) -> AfterValidator:
    """Annotation of text that has to match a regular expression as a whole.

    Args:
        pattern: Regular expression.
        message: End of the error message: "must be ...".
    """

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise refusal(message)
        return text

    return AfterValidator(check)


def one_of(message: str) -> WrapValidator:
    """Annotation of a setting of several types, whose errors are replaced by one.

    Args:
        message: End of the error message: "must be ...".
    """

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError as error:
            raise refusal(message) from error

    return WrapValidator(check)


@dataclass(frozen=True, slots=True)
class FunctionName:
    """Annotation of a setting that names a function: a built-in one by its name, or the user's as "module:function".

    Validation imports nothing; `load_config` then imports the user's function.

    Args:
        names: Names of the built-in functions.
        arguments: Positional arguments of the function. `load_config` refuses a function that does not take them, or is
            async. Empty if they are not known.
        may_be_class: A class is accepted, too, because the function constructs an object.
        kind: Class of the named object, if it is not a function.

    Example: `loss: Annotated[str, FunctionName(("grpo", "gspo"), ("tokens", "clip"), may_be_class=False)] = "grpo"`
    """

    names: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    may_be_class: bool = True
    kind: type | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value not in self.names and not all(value.partition(":")):
            known = f"one of {', '.join(self.names)}, or your own as " if self.names else ""
            raise refusal(f'must be {known}"module:function"')
        return value


@dataclass(frozen=True, slots=True)
class TakesEffect:
    """Condition under which a setting has an effect, declared in its annotation: another setting has a certain value.

    A run refuses a setting whose condition does not hold and whose value is not its default, see
    `titan_rl.config.conflicts`. The condition of a table holds for all settings in it.

    Args:
        setting: Dotted name of the other setting, or of a property of its table.
        one_of: Values of the other setting with which this one has an effect; if it is a list, one matching item is
            enough.
        none_of: Values without an effect; all others have one.
        up_to: The setting has an effect up to the value of the other setting.
        without: Description of the failed condition, if the other's value does not explain it, such as
            "without hosts.provider".
        fix: Advice; by default made of the values.

    Example: `kl: Annotated[KLEstimate, TakesEffect("training.kl_coef", none_of=(0.0,))] = "k3"`
    """

    setting: str
    one_of: tuple[object, ...] = ()
    none_of: tuple[object, ...] = ()
    up_to: bool = False
    without: str = ""
    fix: str = ""

    def holds(self, value: Any, other: Any) -> bool:
        """Whether the condition holds.

        Args:
            value: Value of the setting whose annotation declares the condition.
            other: Value of the other setting.
        """
        if self.up_to:
            return value is None or value <= other
        items: tuple[Any, ...] = cast("tuple[Any, ...]", other) if isinstance(other, tuple) else (other,)
        return any(item in self.one_of for item in items) if self.one_of else any(i not in self.none_of for i in items)


INNER = ""
"""Key of all settings of nested tables."""


MAX_NAME = 255
"""Largest number of bytes in one component of a path."""
MAX_PATH = 4095


def path_problem(path: str) -> str | None:
    """Reason why no file can have this path, for a message; None if one can."""
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
        raise refusal(problem)
    return path


PathText = Annotated[str, AfterValidator(_possible)]
"""Path of a file or folder that need not exist."""


def _found(path: str, info: ValidationInfo) -> str:
    folders_of: dict[str, list[Path]] = info.context["folders"] if info.context else {INNER: [Path()]}
    folders = folders_of.get(info.field_name or INNER, folders_of[INNER])
    for folder in folders if path else ():
        if (found := folder / os.path.expanduser(path)).exists():
            return str(found.resolve())
    return path


FilePath = Annotated[PathText, AfterValidator(_found)]
"""File or folder, searched in the current directory, then in the folder of the TOML file. The setting holds the path
that was found, or the given one if nothing was found: opening it then fails."""


def names_file(info: FieldInfo) -> bool:
    """Return whether a field, or each of its items, has the type `FilePath`."""

    def parts(annotation: Any) -> Iterator[object]:
        for argument in get_args(annotation):
            yield from getattr(argument, "__metadata__", ())
            yield from parts(argument)

    metadata = (*info.metadata, *parts(info.annotation))
    return any(isinstance(part, AfterValidator) and part.func is _found for part in metadata)


def dotted(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Settings by their dotted names, including those in tables.

    >>> dict(dotted({"seed": 1, "training": {"steps": 3}}))
    {'seed': 1, 'training.steps': 3}
    """
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(cast("Mapping[str, object]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
