"""The package `renderers`, imported without its client of HTTP servers: `openai` takes half a second to import in every
process that renders, and is not used."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGE = "renderers"


class _LazyPackage(ModuleType):
    """A package whose modules can be imported before its `__init__` has run. That runs when one of its own names is
    first asked for, as by `from renderers import Qwen3Renderer`."""

    _running = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with self._running:
            if self.__class__ is _LazyPackage:
                self.__class__ = ModuleType
                try:
                    spec = self.__spec__
                    assert spec is not None
                    assert spec.loader is not None
                    spec.loader.exec_module(self)
                except BaseException:
                    self.__class__ = _LazyPackage
                    raise
        return getattr(self, name)


def renderers_module(name: str) -> Any:
    """Import a module of the package: `renderers_module("base")`.

    Raises:
        ImportError: the package is not installed.
    """
    if PACKAGE not in sys.modules and (spec := find_spec(PACKAGE)) is not None:
        package = _LazyPackage(PACKAGE)
        package.__spec__, package.__loader__, package.__package__ = spec, spec.loader, PACKAGE
        package.__path__, package.__file__ = list(spec.submodule_search_locations or ()), spec.origin
        sys.modules.setdefault(PACKAGE, package)
    return import_module(f"{PACKAGE}.{name}")
