#!/usr/bin/env python3
"""Measure the structure and the language of a package: shape.py [FOLDER] [--against COMMIT].

The script only reads the source and imports nothing from the package, so it can measure any commit.

    python scripts/shape.py                       # the working tree
    python scripts/shape.py --against 73a30ee     # compared with that commit, as a Markdown table
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

OPENINGS = ("What", "Who", "Whom", "Whose", "Which", "How", "Where", "When", "Those", "That", "Of", "So", "As")
"""First words that a docstring should not have: it should start with a noun phrase or an imperative."""

SETTINGS_ROOT = "RunConfig"
"""The class whose fields are the settings of a run."""

GLOSSARY = Path("docs", "glossary.md")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Shape:
    """Figures of one package.

    Attributes:
        code_lines: Number of lines with code. Blank lines, comments and docstrings do not count.
        import_lines: Number of code lines that belong to an import statement.
        callable_parameters: Number of function parameters whose annotation mentions `Callable`.
        openings: Docstrings that begin with one of `OPENINGS`, as "file:line first line".
        settings: Number of keys of `SETTINGS_ROOT`, including tables.
        longest_function: Number of lines of the longest function, and its location.
        packages: Folders on the first level.
        arrows: Pairs of a package or module on the first level and another that it imports.
    """

    files: int = 0
    code_lines: int = 0
    import_lines: int = 0
    callable_parameters: int = 0
    docstrings: int = 0
    openings: list[str] = field(default_factory=list[str])
    settings: int = 0
    glossary: int = 0
    longest_function: tuple[int, str] = (0, "")
    packages: set[str] = field(default_factory=set[str])
    arrows: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def rows(self) -> dict[str, str]:
        """Return the figures, formatted for a table."""
        lines, place = self.longest_function
        return {
            "files": f"{self.files}",
            "code lines": f"{self.code_lines}",
            "files per 1,000 code lines": f"{1000 * self.files / max(self.code_lines, 1):.1f}",
            "imports, of code lines": f"{self.import_lines / max(self.code_lines, 1):.1%}",
            "parameters typed Callable": f"{self.callable_parameters}",
            "docstrings opening What, Who, How, Where, Of ...": (
                f"{len(self.openings)} of {self.docstrings} ({self.share_of_openings:.1%})"
            ),
            "settings of a run": f"{self.settings}",
            "glossary entries": f"{self.glossary}",
            "longest function": f"{lines} lines ({place})" if place else "none",
            "packages of the first level": f"{len(self.packages)}",
            "import arrows between them": f"{len(self.arrows)}",
        }

    @property
    def share_of_openings(self) -> float:
        return len(self.openings) / max(self.docstrings, 1)


def measure(package: Path) -> Shape:
    """Measure the Python files below `package`. The glossary is expected in docs/ next to it."""
    shape = Shape()
    classes: dict[str, ast.ClassDef] = {}
    for file in sorted(package.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        relative = file.relative_to(package)
        shape.files += 1
        shape.code_lines += len(code_lines(source, tree))
        _note_imports(shape, tree, package.name, relative)
        for node in ast.walk(tree):
            if isinstance(node, Function):
                _note_function(shape, node, relative)
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                shape.docstrings += 1
                if re.match(rf"(?:{'|'.join(OPENINGS)})\b", text):
                    shape.openings.append(f"{relative}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}")
    shape.settings = sum(1 for _ in setting_keys(classes, SETTINGS_ROOT))
    glossary = package.parent / GLOSSARY
    shape.glossary = count_entries(glossary.read_text(encoding="utf-8")) if glossary.is_file() else 0
    return shape


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines with code. All lines of a multi-line string count."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            found.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return found


def setting_keys(classes: dict[str, ast.ClassDef], root: str, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the keys of a settings class, including its tables and their keys.

    Example: `training` and `training.lr`.
    """
    for name, annotation in _fields(classes, root).items():
        yield f"{prefix}{name}"
        inner = _plain(annotation)
        if inner in classes and _is_settings(classes, inner):
            yield from setting_keys(classes, inner, f"{prefix}{name}.")


def count_entries(glossary: str) -> int:
    """Count the rows of the tables in a Markdown page, without headers."""
    rows = re.findall(r"^\|.*\|$", glossary, re.MULTILINE)
    rules = [row for row in rows if re.fullmatch(r"[|:\- ]+", row)]
    return len(rows) - 2 * len(rules)


def _note_imports(shape: Shape, tree: ast.Module, root: str, relative: Path) -> None:
    part = relative.parts[0].removesuffix(".py")
    if len(relative.parts) > 1:
        shape.packages.add(part)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module):
                imported = [module or ""]
            case ast.Import(names=names):
                imported = [alias.name for alias in names]
            case _:
                continue
        shape.import_lines += (node.end_lineno or node.lineno) - node.lineno + 1
        for name in imported:
            top, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if top == root and other and part not in ("__init__", other):
                shape.arrows.add((part, other))


def _note_function(shape: Shape, node: Function, relative: Path) -> None:
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.annotation is not None and "Callable" in ast.unparse(argument.annotation):
            shape.callable_parameters += 1
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length > shape.longest_function[0]:
        shape.longest_function = (length, f"{relative}:{node.lineno} {node.name}")


def _fields(classes: dict[str, ast.ClassDef], name: str) -> dict[str, ast.expr]:
    """Return the annotated public fields of a class, starting with those of its base classes."""
    if name not in classes:
        return {}
    found: dict[str, ast.expr] = {}
    for base in _bases(classes[name]):
        found.update(_fields(classes, base))
    for statement in classes[name].body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=field_name), annotation=annotation):
                if not field_name.startswith("_") and "ClassVar" not in ast.unparse(annotation):
                    found[field_name] = annotation
            case _:
                pass
    return found


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id if isinstance(base, ast.Name) else ast.unparse(base).rpartition(".")[2] for base in node.bases]


def _is_settings(classes: dict[str, ast.ClassDef], name: str) -> bool:
    """Return whether a class derives from pydantic's `BaseModel`."""
    return any(
        base == "BaseModel" or (base in classes and _is_settings(classes, base)) for base in _bases(classes[name])
    )


def _plain(annotation: ast.expr) -> str:
    """Return the class in an annotation, without `Annotated`, `Optional` and `| None`; otherwise the annotation
    itself."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            return _plain(first)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _plain(inner)
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return _plain(left)
        case _:
            text = ast.unparse(annotation)
            return text.rpartition(".")[2] if isinstance(annotation, ast.Attribute) else text


def measure_commit(package: Path, commit: str) -> Shape:
    """Measure `package` at a commit of its repository.

    Raises:
        SystemExit: Git does not know the commit, or the commit lacks the package.
    """
    repository = package.resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        for path in (package.name, GLOSSARY.as_posix()):
            command = ["git", "-C", str(repository), "archive", "--format=tar", f"{commit}:./", path]
            done = subprocess.run(command, capture_output=True, timeout=300)
            if done.returncode and path == package.name:
                raise SystemExit(f"shape.py: {path} of {commit} cannot be read: {done.stderr.decode().strip()}")
            if not done.returncode:
                with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
                    archive.extractall(folder, filter="data")
        return measure(Path(folder, package.name))


def table(columns: dict[str, Shape]) -> Iterable[str]:
    """Lines of a Markdown table with one column per shape."""
    figures = {head: shape.rows() for head, shape in columns.items()}
    yield f"| | {' | '.join(figures)} |"
    yield f"|---|{'---|' * len(figures)}"
    rows: dict[str, list[str]] = defaultdict(list)
    for column in figures.values():
        for name, figure in column.items():
            rows[name].append(figure)
    for name, cells in rows.items():
        yield f"| {name} | {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the structure and the language of a Python package.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1] / "titan_rl")
    parser.add_argument("--against", metavar="COMMIT", help="measure that commit, too, and print both")
    parser.add_argument("--openings", action="store_true", help="list the docstrings to reword")
    given = parser.parse_args(arguments)
    folder = given.folder.resolve()
    shape = measure(folder)
    if given.against:
        print("\n".join(table({given.against: measure_commit(folder, given.against), "now": shape})))
    else:
        for name, figure in shape.rows().items():
            print(f"{name}: {figure}")
    if given.openings:
        print("\n".join(shape.openings))


if __name__ == "__main__":
    main()
