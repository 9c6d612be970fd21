"""The package `renderers`, imported without its client of HTTP servers: `openai` takes half a second to import in every
process that renders, and is not used."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGE = "renderers"


class _LazyPackage(ModuleType):
    """A package whose modules can be imported before its `__init__` has run. `__init__` runs when one of its own names
    is first accessed, as by `from renderers import Qwen3Renderer`."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__package__ = spec, spec.loader, spec.name
        self.__path__, self.__file__ = list(spec.submodule_search_locations or ()), spec.origin
        self._runs = self._has_run = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            with _running:  # another thread may run it at the same time
                if not (self._runs or self._has_run):
                    self._run()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def _run(self) -> None:
        loader = self.__loader__
        assert isinstance(loader, InspectLoader)
        self._runs = True  # `__init__` accesses its own names
        try:
            loader.exec_module(self)
            self._has_run = True
        finally:
            self._runs = False


_running = threading.RLock()


def renderers_module(name: str) -> Any:
    """Import a module of the package: `renderers_module("base")`.

    Raises:
        ImportError: the package is not installed.
    """
    if PACKAGE not in sys.modules and (spec := find_spec(PACKAGE)) is not None:
        sys.modules.setdefault(PACKAGE, _LazyPackage(spec))
    return import_module(f"{PACKAGE}.{name}")
