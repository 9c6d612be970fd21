"""Source code of the user's modules with which a run began, for processes that the run starts later.

A process that replaces another one would otherwise import files that were edited during the run, so that two versions
of a reward would score one batch.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

LIBRARY = Path(__file__).resolve().parents[2]
"""Folder of titan_rl itself."""


def loaded_code(named: Collection[str] = ()) -> dict[str, bytes]:
    """Read the source of the user's modules that this process has imported.

    Args:
        named: Modules that settings name. Their packages count as the user's even if they are installed.

    Returns:
        Contents of the files by module. Installed packages, Python's library and titan_rl are left out.
    """
    packages = {name.partition(".")[0] for name in named}
    found: dict[str, bytes] = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        is_named = name.partition(".")[0] in packages
        if not path.is_relative_to(LIBRARY) and (is_named or not _is_installed(path)):
            try:
                found[name] = path.read_bytes()
            except OSError:  # it was removed after its import
                continue
    return found


def _is_installed(path: Path) -> bool:
    paths = sysconfig.get_paths()
    folders = [*(paths[name] for name in ("stdlib", "platstdlib", "scripts")), *site.getsitepackages()]
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(
        path.is_relative_to(folder) or path.is_relative_to(Path(folder).resolve()) for folder in folders
    )


def import_recorded(code: Mapping[str, bytes]) -> None:
    """From now on import these modules in this process with their recorded source, even if their files have changed.

    Args:
        code: Result of `loaded_code` in the process in which the run began.
    """
    if code:
        sys.meta_path.insert(0, _RecordedFinder(code))


class _RecordedFinder(MetaPathFinder):
    def __init__(self, code: Mapping[str, bytes]) -> None:
        self._code = code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (source := self._code.get(fullname)) is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _RecordedLoader(fullname, spec.origin, source)
        return spec


class _RecordedLoader(SourceFileLoader):
    """Loader of one module. It reads no bytecode, which may be of the changed file, and writes none."""

    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)

    def get_data(self, path: str) -> bytes:
        return self._source if path == self.path else super().get_data(path)
