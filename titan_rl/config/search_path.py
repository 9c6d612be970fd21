"""Where modules that settings name are found: the task's, and those of every "module:function"."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from typing import cast

from titan_rl.config.explain import ARGUMENTS, COMMAND_LINE, Origins
from titan_rl.config.tables import read_tables
from titan_rl.core.calls.imports import search_in
from titan_rl.core.settings import path_problem

_NAMES_CODE = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")


class SearchPath:
    """The current folder, those that `pythonpath` names, and the one of each TOML file, in this order. Where a TOML
    file lies in a package, it is the folder that holds the package.

    Args:
        given: what `pythonpath` was set to; nothing is done with what is no list of folders.
    """

    def __init__(self, given: object, origins: Origins) -> None:
        is_of_file = origins.of("pythonpath") not in (COMMAND_LINE, ARGUMENTS)
        base = origins.folders_for("pythonpath")[-1] if is_of_file else Path()
        self._given = [str((base / folder).resolve()) for folder in _folders(given)]
        self._others = [os.getcwd(), *(str(_import_root(toml)) for toml in origins.files)]
        search_in([*self._given, *self._others])

    def needed_for(self, modules: Iterable[str]) -> tuple[str, ...]:
        """The folders to search for imported modules from anywhere: those given, and those that hold one of them."""
        homes = {home for name in modules if (home := _home(name)) is not None}
        return tuple(dict.fromkeys([*self._given, *(folder for folder in self._others if folder in homes)]))


def recorded_modules(toml: Path) -> dict[str, str]:
    """Modules that a file of settings names and that its `pythonpath`, or the folder it lies in, holds, with the folder
    of each. Nothing is imported."""
    tables, _ = read_tables([toml], ())
    places = [str((toml.parent / folder).resolve()) for folder in _folders(tables.get("pythonpath"))]
    places.append(str(_import_root(toml)))
    found: dict[str, str] = {}
    for name in dict.fromkeys(_modules_in(tables)):
        spec = PathFinder.find_spec(name.partition(".")[0], places)
        origin = None if spec is None else next(iter(spec.submodule_search_locations or ()), None) or spec.origin
        if origin is not None:
            found[name] = str(Path(origin).parent)
    return found


def _folders(given: object) -> list[str]:
    """Those that can be folders at all; others are an error of settings, told with the rest of them."""
    items = cast("Iterable[object]", given) if isinstance(given, list | tuple) else ()
    return [folder for folder in items if isinstance(folder, str) and not path_problem(folder)]


def _modules_in(value: object) -> Iterator[str]:
    if isinstance(value, str) and (named := _NAMES_CODE.fullmatch(value)):
        yield named[1]
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_modules_in, cast("Mapping[str, object]", value).values()))
    elif isinstance(value, list):
        yield from chain.from_iterable(map(_modules_in, cast("list[object]", value)))


def _import_root(toml: Path) -> Path:
    folder = toml.resolve().parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def _home(name: str) -> str | None:
    """The folder by which an imported module was found."""
    top = sys.modules.get(name.partition(".")[0])
    place = next(iter(getattr(top, "__path__", ())), None) or getattr(top, "__file__", None)
    return None if place is None else str(Path(place).resolve().parent)
