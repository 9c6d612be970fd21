"""Imports between the parts of titan_rl point one way, and are those that docs/architecture.md names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each part may import, in the order in which they stand on each other: one may import only what is above it.
MAY_IMPORT = {
    "arrays": "",
    "errors": "",
    "metrics": "",
    "settings": "",
    "tracing": "",
    "types": "arrays",
    "calls": "errors",
    "starter": "errors",
    "tiny_model": "errors",
    "weights": "arrays calls errors",
    "generation": "arrays calls errors tracing types",
    "rollout": "arrays calls errors settings tracing types",
    "tasks": "calls errors rollout settings",
    "scheduling": "calls errors rollout settings tracing types",
    "training": "arrays calls errors rollout settings tracing types weights",
    "sinks": "calls errors metrics settings",
    "providers": "calls errors settings",
    "config": "calls errors generation providers rollout scheduling settings sinks tiny_model training weights",
    "serving": "calls errors generation rollout types",
    "evaluation": "calls errors rollout types",
    "agents": "calls errors generation rollout serving settings tracing types",
    "players": "agents calls errors rollout serving settings",
    "adapters": "calls errors players rollout settings tasks",
    "testing": "arrays errors generation types weights",
    "simulate": "arrays errors generation rollout scheduling types",
    "actors": "arrays calls config errors generation rollout tracing training types weights",
    "viewer": "calls config errors metrics scheduling",
    "run": (
        "actors arrays calls config errors evaluation generation metrics providers rollout scheduling serving sinks "
        "tiny_model tracing training types viewer weights"
    ),
    "cli": "calls config errors evaluation providers run settings starter tiny_model viewer",
}


@cache
def imports() -> dict[str, set[str]]:
    """The modules of titan_rl that each of its modules imports, wherever in it, but for type checking too."""
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


def part(module: str) -> str:
    return module.split(".")[1]


def room(module: str) -> str:
    """The folder in a part, or the module itself where it lies in none."""
    return ".".join(module.split(".")[:3])


def between(level) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports().items():
        if module == "titan_rl":
            continue
        for other in imported:
            if other != "titan_rl" and level(other) != level(module):
                edges[level(module)].add(level(other))
    return edges


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_part_imports_what_it_may(name: str) -> None:
    allowed = MAY_IMPORT[name].split()
    strays = {
        f"{module} -> {other}"
        for module, imported in imports().items()
        for other in imported
        if module != "titan_rl" and part(module) == name and part(other) not in (name, *allowed)
    }
    assert not strays


def test_every_part_is_listed_and_stands_below_what_imports_it() -> None:
    modules = [path for path in (ROOT / "titan_rl").iterdir() if path.is_dir() or path.suffix == ".py"]
    parts = {path.stem for path in modules if not path.name.startswith("__")}
    assert parts == set(MAY_IMPORT)
    order = list(MAY_IMPORT)
    for name, allowed in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(name) for other in allowed.split()), name


def test_nothing_is_allowed_that_nobody_imports() -> None:
    edges = between(part)
    unused = {name: set(allowed.split()) - edges[name] for name, allowed in MAY_IMPORT.items()}
    assert not {name: found for name, found in unused.items() if found}


def test_no_two_parts_or_rooms_import_each_other() -> None:
    for level in (part, room):
        edges = between(level)
        mutual = [(a, b) for a, b in combinations(edges, 2) if b in edges[a] and a in edges[b]]
        assert not mutual


def test_the_picture_in_the_docs_has_every_part() -> None:
    told = (ROOT / "docs" / "architecture.md").read_text()
    for name in MAY_IMPORT:
        assert re.search(rf"`{name}(/|\.py)`", told), f"docs/architecture.md does not name {name}"


@pytest.mark.parametrize("name", ["run", "actors", "serving"])
def test_the_picture_in_the_docs_has_the_folders_of_a_part_above_those_that_they_import(name: str) -> None:
    told = (ROOT / "docs" / "architecture.md").read_text()
    (line,) = re.findall(rf"^    {name}/ +(.*)$", told, re.MULTILINE)
    rooms = re.findall(r"(\w+)/", line)
    folders = {path.parent.name for path in (ROOT / "titan_rl" / name).glob("*/__init__.py")}
    assert set(rooms) == folders
    edges = between(room)
    for above, below in combinations(rooms, 2):
        assert f"titan_rl.{name}.{above}" not in edges[f"titan_rl.{name}.{below}"], f"{below} imports {above}"
