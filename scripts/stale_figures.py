#!/usr/bin/env python3
"""Mark the figures of benchmarks/RESULTS.md whose subject has changed since they were measured.

    python scripts/stale_figures.py               # every stale figure, with the changed files
    python scripts/stale_figures.py --fail        # exit code 1 if there is one

The subject of a figure is its benchmark and the modules of titan_rl that the benchmark imports by name; a package in an
import stands for all of its files. A benchmark that starts programs names its subject in a constant:
`SUBJECT = ("titan_rl",)`. Changes of comments, docstrings and formatting do not count. Only git and the source are
read; nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import RESULTS, Figure, figures

EXIT_UNREAD = 141
"""Exit code if the reader of the output has closed it, as of a program that SIGPIPE ends."""


def subject_of(root: Path, module: str) -> tuple[str, ...]:
    """Return the files and folders, relative to `root`, that the figures of a benchmark depend on."""
    seen: set[str] = set()
    paths: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = Path(root, "benchmarks", *name.split(".")).with_suffix(".py")
        if not name or name in seen or not file.is_file():
            continue
        seen.add(name)
        paths.add(str(file.relative_to(root)))
        for imported in _imports(ast.parse(file.read_text())):
            if imported.startswith("benchmarks."):
                _, *parts = imported.split(".")
                waiting += [".".join(parts), ".".join(parts[:-1])]  # the last part may be a name in the module
            elif (found := _path_of(root, imported)) is not None:
                paths.add(found)
        paths |= set(_declared(ast.parse(file.read_text())))
    return tuple(sorted(paths))


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of imported modules, and of imported names, which may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _path_of(root: Path, imported: str) -> str | None:
    """Return the file or folder of a module of titan_rl, or of its parent if the last part is a name in the parent."""
    parts = imported.split(".")
    if parts[0] != "titan_rl":
        return None
    for end in (len(parts), len(parts) - 1):
        path = Path(*parts[:end])
        if (root / path).with_suffix(".py").is_file():
            return str(path.with_suffix(".py"))
        if end > 1 and (root / path / "__init__.py").is_file():
            return str(path)
    return None


def _declared(tree: ast.Module) -> Sequence[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["SUBJECT"]:
            return ast.literal_eval(node.value)
    return ()


class CodeChanges:
    """Changes of benchmarks' subjects since earlier commits. Each pair of versions of a file is compared once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._subjects: dict[str, tuple[str, ...]] = {}  # by benchmark
        self._changed: dict[tuple[str, str], tuple[str, ...] | None] = {}  # by commit and benchmark
        self._is_same: dict[tuple[str, str], bool] = {}  # by the hash of the earlier version, and the path

    def since(self, commit: str, module: str) -> tuple[str, ...] | None:
        """Return the files of a benchmark's subject whose code differs from that of a commit; None if git does not know
        the commit."""
        if module not in self._subjects:
            self._subjects[module] = subject_of(self._root, module)
        if (commit, module) not in self._changed:
            self._changed[commit, module] = self._compared(commit, self._subjects[module])
        return self._changed[commit, module]

    def _compared(self, commit: str, subject: Sequence[str]) -> tuple[str, ...] | None:
        try:
            listed = self._git("diff", "--raw", "--no-abbrev", "--no-renames", "-z", commit, "--", *subject).decode()
        except subprocess.CalledProcessError:
            return None
        fields = listed.split("\0")
        changes = [(*head.split()[2:], path) for head, path in zip(fields[::2], fields[1::2], strict=False)]
        both = [(before, path) for before, _, kind, path in changes if kind == "M" and path.endswith(".py")]
        new = [pair for pair in both if pair not in self._is_same]
        for (before, path), source in zip(new, self._earlier([before for before, _ in new]), strict=True):
            self._is_same[before, path] = has_same_code(source, (self._root / path).read_bytes())
        return tuple(path for before, _, _, path in changes if not self._is_same.get((before, path)))

    def _earlier(self, hashes: Sequence[str]) -> Iterator[bytes]:
        """Yield the contents of files that git has stored."""
        requests = "".join(f"{each}\n" for each in hashes).encode()
        stored = io.BytesIO(self._git("cat-file", "--batch", stdin=requests))
        while head := stored.readline():
            yield stored.read(int(head.split()[2]))
            stored.read(1)

    def _git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        git = ["git", "-C", str(self._root), *arguments]
        return subprocess.run(git, input=stdin, capture_output=True, check=True).stdout


_NOT_CODE = re.compile(rb"""("{3}|'{3}|"|')(?:\\.|[^\\])*?\1|#[^\n]*|[\s(),;\\]+""", re.DOTALL)
"""Strings, comments, and characters of which a formatter adds and removes some."""


def has_same_code(one: bytes, other: bytes) -> bool:
    """Return whether two versions of a module differ at most in comments, docstrings and formatting."""
    if _NOT_CODE.sub(b"", one) != _NOT_CODE.sub(b"", other):  # parsing is slow, so only possible equals are parsed
        return False
    try:
        return _code(one) == _code(other)
    except SyntaxError:
        return False


def _code(source: bytes) -> str:
    """Syntax tree of a module without docstrings, which are those of its settings, too."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name, block in ast.iter_fields(node):
            if isinstance(block, list):
                setattr(node, name, [each for each in block if not _is_docstring(each)])
    return ast.dump(tree)


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@dataclass(frozen=True)
class Stale:
    """Figure whose subject has changed.

    Attributes:
        changed: Files of the subject that changed after `commit`.
        reason: Description for the user, if the row has no commit or git does not know it.
    """

    figure: Figure
    commit: str
    changed: tuple[str, ...] = ()
    reason: str = ""


def stale_figures(root: Path) -> Iterator[Stale]:
    """Yield the figures whose subject has changed since their oldest commit, in the order of the table."""
    changes = CodeChanges(root)
    for figure in figures((root / RESULTS).read_text()):
        if figure.module is None:
            continue
        if not figure.commits:
            yield Stale(figure, "", reason="its row has no commit of 7 to 40 hexadecimal digits")
            continue
        found = [_compared(changes, figure, commit) for commit in figure.commits]
        worst = max(found, key=lambda each: (bool(each.reason), len(each.changed)))
        if worst.changed or worst.reason:
            yield worst


def _compared(changes: CodeChanges, figure: Figure, commit: str) -> Stale:
    assert figure.module is not None
    changed = changes.since(commit, figure.module)
    if changed is None:
        return Stale(figure, commit, reason=f"git does not know commit {commit}")
    return Stale(figure, commit, changed)


def described(stale: Stale) -> str:
    """Line for the user."""
    names = ", ".join(stale.figure.names)
    if stale.reason:
        return f"{names}: {stale.reason}"
    files = f"{', '.join(stale.changed[:3])}{' and others' if len(stale.changed) > 3 else ''}"
    count = "1 file" if len(stale.changed) == 1 else f"{len(stale.changed)} files"
    return f"{names}: stale since {stale.commit}: {count} changed: {files}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="folder of the repository")
    parser.add_argument("--fail", action="store_true", help="exit with 1 if a figure is stale")
    arguments = parser.parse_args()
    root: Path = arguments.root
    if not (root / RESULTS).is_file():
        parser.error(f"--root: {root} has no {RESULTS}")
    git = subprocess.run(["git", "-C", str(root), "rev-parse"], capture_output=True, text=True, check=False)
    if git.returncode:
        parser.error(f"--root: git cannot read {root}: {git.stderr.strip()}")
    found = list(stale_figures(root))
    try:
        sys.stdout.writelines(f"{described(stale)}\n" for stale in found)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at its end
        if isinstance(error, BrokenPipeError):  # for example by `| head`
            return EXIT_UNREAD
        print(f"cannot write the stale figures: {error}", file=sys.stderr)
        return 1
    print(f"stale rows of {RESULTS}: {len(found)}", file=sys.stderr)
    return 1 if found and arguments.fail else 0


if __name__ == "__main__":
    sys.exit(main())
