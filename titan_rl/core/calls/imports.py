"""Imports on demand: objects that settings name, by a built-in name or as "module:name", and optional dependencies."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import ConfigError, MissingExtraError

T = TypeVar("T")


def search_in(folders: Iterable[str]) -> None:
    """Add folders to the search path, after the current folder and before installed packages."""
    current = os.getcwd()
    if current not in sys.path:
        sys.path.insert(0, current)
    index = sys.path.index(current) + 1
    sys.path[index:index] = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]


def import_module(name: str) -> ModuleType:
    """Import a module, also from the current directory, like `python -m`, or from a folder of `search_in`.

    Raises:
        ConfigError: there is no such module, or its import failed.
    """
    search_in(())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"importing {name} failed: {error}") from error
        raise ConfigError(f"there is no module {error.name}; looked in {', '.join(_searched())}") from None
    except (Exception, SystemExit) as error:  # SystemExit comes from a script that calls sys.exit
        raise ConfigError(f"importing {name} failed: {describe(error)}") from error


def find_attribute(module: ModuleType, name: str) -> Any:
    """The attribute of a module; None if it has no such attribute.

    Raises:
        ConfigError: the module's own `__getattr__` failed.
    """
    try:
        return getattr(module, name, None)
    except Exception as error:
        raise ConfigError(f"{module.__name__}.{name} cannot be read: {type(error).__name__}: {error}") from error


def find_function(setting: str, name: str, known: Mapping[str, T], kind: type[T] | None = None) -> T:
    """The function of `known` with this name, or the one that "module:function" names.

    Args:
        setting: Name of the setting, for the error.
        kind: Class of the object to find, if it is not a function.

    Raises:
        ConfigError: there is no such function.
    """
    if name in known:
        return known[name]
    noun = "function" if kind is None else kind.__name__

    def fits(value: object) -> bool:
        return callable(value) if kind is None else isinstance(value, kind)

    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(
            f'{setting} = {name!r} is unknown; it must be one of {", ".join(known)}, or "module:{noun.lower()}"'
        )
    try:
        found = find_attribute(import_module(module_name), attribute)
    except ConfigError as error:
        raise ConfigError(f"{setting} = {name!r}: {error}") from error.__cause__
    if not fits(found):
        names = ", ".join(_names(import_module(module_name), fits)) or "none"
        raise ConfigError(f"{setting} = {name!r}: {module_name} has no {noun} {attribute}; it has: {names}")
    return found


def name_of(function: object) -> str | None:
    """The name "module:function" of a function; None if it cannot be imported by this name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    imported = sys.modules.get(str(module))
    if name is None or imported is None or find_attribute(imported, name) is not function:
        return None
    return f"{module}:{name}"


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, which the extra `extra` installs.

    Example: `torch = require("torch", "cpu")`.

    Raises:
        MissingExtraError: the module is not installed; the message names the extra. If the import of an installed
            module fails, its own error is raised.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # `import torchtitan.models.qwen3` fails with the name of the first missing package. Any other missing module is
        # imported by the module itself, and hiding its name would mislead.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MissingExtraError(error.name, extra) from error


def _searched() -> list[str]:
    """Folders of the search path that may hold modules of the user, without those of installations."""
    installed = (sys.prefix, sys.base_prefix)
    folders = [path for path in dict.fromkeys(sys.path) if os.path.isabs(path)]  # others stand for import hooks
    return [folder for folder in folders if not folder.startswith(installed)]


def _names(module: ModuleType, fits: Callable[[Any], bool]) -> list[str]:
    """Public names of a module for functions that it defines, or for other objects that fit."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and fits(value)
        and (not hasattr(value, "__qualname__") or value.__module__ == module.__name__)
    ]
