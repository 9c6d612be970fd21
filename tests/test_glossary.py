"""The glossary matches the code: the names in it exist, and public class names are unique."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def members(node: ast.ClassDef) -> Iterator[str]:
    """Methods, fields and attributes set on `self`."""
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name


@cache
def definitions() -> tuple[dict[str, list[str]], set[str]]:
    """Modules that define each public class, and all names that modules define, including "Class.member"."""
    classes: dict[str, list[str]] = defaultdict(list)
    names: set[str] = set()
    for path in sorted((ROOT / "titan_rl").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.ClassDef(name=name):
                    names.update([name, *(f"{name}.{member}" for member in members(node))])
                    if not name.startswith("_"):
                        classes[name].append(path.relative_to(ROOT).as_posix())
                case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                    names.add(name)
                case _:
                    pass
    return classes, names


def test_class_names_are_unique() -> None:
    classes, _ = definitions()
    assert not {name: modules for name, modules in classes.items() if len(modules) > 1}


def test_names_in_the_glossary_exist() -> None:
    rows = re.findall(r"^\| [^|]+\|[^|]+\| ([^|]+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert 30 < len(rows) <= 41  # with the header
    named = {name.removeprefix("titan_rl.") for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    code = {name for name in named if not name.endswith(".py") and name != "session_id"}
    _, names = definitions()
    assert not code - names
