"""The packages of titan_rl, and the folders in them, import each other in one direction only."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The packages that each package may import, lowest first: a package imports only packages listed above it.
MAY_IMPORT = {
    "core": "",
    "types": "core",
    "metrics": "core",
    "weights": "core",
    "generation": "core types",
    "rollout": "core types",
    "serving": "core generation rollout types",
    "tasks": "core generation rollout serving types",
    "scheduling": "core rollout types",
    "training": "core rollout types weights",
    "config": "core generation metrics rollout scheduling training weights",
    "testing": "core generation types weights",
    "viewer": "config core metrics rollout scheduling",
    "cluster": "config core generation rollout scheduling training types weights",
    "run": "cluster config core generation metrics rollout scheduling serving tasks training types viewer weights",
    "evaluation": "cluster config core generation rollout run serving training types weights",
    "api": "config core evaluation generation metrics rollout run scheduling training types weights",
    "cli": "cluster config core evaluation run training viewer",
}
MODULES = ("types", "api")  # top-level modules, which are not packages


@cache
def imports() -> dict[str, set[str]]:
    """The modules of titan_rl that each of its modules imports, inside functions and for type checking too."""
    modules = {}
    for path in (ROOT / "titan_rl").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("titan_rl"):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[name].add(inner if inner in modules else node.module)
            elif isinstance(node, ast.Import):
                found[name].update(alias.name for alias in node.names if alias.name.startswith("titan_rl"))
    return found


def package(module: str) -> str:
    return module.split(".")[1]


def folder(module: str) -> str:
    """The folder in a package, or the module itself where it lies directly in the package."""
    return ".".join(module.split(".")[:3])


def subfolder(module: str) -> str:
    return ".".join(module.split(".")[:4])


def edges_between(level: Callable[[str], str]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports().items():
        if module == "titan_rl":
            continue
        for other in imported:
            if other != "titan_rl" and level(other) != level(module):
                edges[level(module)].add(level(other))
    return edges


def in_cycles(edges: Mapping[str, Set[str]]) -> set[str]:
    def reached_from(start: str) -> set[str]:
        seen: set[str] = set()
        open_nodes = [start]
        while open_nodes:
            new = edges.get(open_nodes.pop(), set()) - seen
            seen |= new
            open_nodes.extend(new)
        return seen

    return {node for node in edges if node in reached_from(node)}


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_package_imports_only_allowed_packages(name: str) -> None:
    allowed = MAY_IMPORT[name].split()
    strays = {
        f"{module} -> {other}"
        for module, imported in imports().items()
        for other in imported
        if module != "titan_rl" and package(module) == name and package(other) not in (name, *allowed)
    }
    assert not strays


def test_packages_are_listed_above_their_importers() -> None:
    entries = [path for path in (ROOT / "titan_rl").iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))]
    assert {path.stem for path in entries if not path.name.startswith("__")} == set(MAY_IMPORT)
    order = list(MAY_IMPORT)
    for name, allowed in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(name) for other in allowed.split()), name


def test_there_are_at_most_sixteen_packages() -> None:
    assert len(set(MAY_IMPORT) - set(MODULES)) <= 16


def test_every_allowed_import_is_used() -> None:
    edges = edges_between(package)
    unused = {name: set(allowed.split()) - edges[name] for name, allowed in MAY_IMPORT.items()}
    assert not {name: found for name, found in unused.items() if found}


@pytest.mark.parametrize("level", [package, folder, subfolder, str])
def test_there_is_no_import_cycle(level: Callable[[str], str]) -> None:
    assert not in_cycles(edges_between(level))


def test_cycle_of_three_is_found() -> None:
    assert in_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}


def test_architecture_page_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in MAY_IMPORT:
        assert re.search(rf"`{name}(/|\.py)`", text), f"docs/architecture.md does not name {name}"
