"""What the docs name is there: files by their paths, and imports of their examples."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = [str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/**/*.py")]  # not what is installed in .venv
HEAVY = ("titan_rl.training.trainer", "titan_rl.generation.vllm_engine")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`([\w./-]+\.py)`", page.read_text())
    missing = [path for path in named if not any(other == path or other.endswith(f"/{path}") for other in CODE)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_imports_is_there(page: Path) -> None:
    for module, names in re.findall(r"^\s*from (titan_rl[\w.]*) import ([\w, ]+)$", page.read_text(), re.M):
        assert importlib.util.find_spec(module) is not None, module
        if module not in HEAVY:
            imported = importlib.import_module(module)
            assert all(hasattr(imported, name.strip()) for name in names.split(",")), (module, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
