"""The examples lie beside the package, and are shipped in it: `titan-rl init NAME --example EXAMPLE` copies them."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithExamples(build_py):
    """Editable installations find the examples where they lie."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shipped = Path(self.build_lib) / "titan_rl" / "cli" / "shipped_examples"
        shutil.copytree(ROOT / "examples", shipped, ignore=_left_out, dirs_exist_ok=True)


def _left_out(folder: str, names: list[str]) -> set[str]:
    """What running examples leaves: caches, runs, hidden files, and models that can be made again. Those with a README
    are part of them."""
    return {
        name
        for name in names
        if name in ("__pycache__", "runs")
        or name.startswith(".")
        or name.endswith(".pyc")
        or (name == "base" and not (Path(folder) / name / "README.md").is_file())
    }


setup(cmdclass={"build_py": BuildWithExamples})
