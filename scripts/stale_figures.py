#!/usr/bin/env python3
"""Mark the figures of benchmarks/RESULTS.md whose subject has changed since they were measured.

    python scripts/stale_figures.py               # every stale figure, with the changed files
    python scripts/stale_figures.py --fail        # exit code 1 if there is one

The subject of a figure is its benchmark and the modules of titan_rl that the benchmark imports by name; a package in an
import stands for all of its files. A benchmark that starts programs names its subject in a constant:
`SUBJECT = ("titan_rl",)`. Only git and the source are read; nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    for figure in figures((root / RESULTS).read_text()):
        if figure.module is None:
            continue
        if not figure.commits:
            yield Stale(figure, "", reason="its row has no commit of 7 to 40 hexadecimal digits")
            continue
        found = [_compared(root, figure, commit) for commit in figure.commits]
        worst = max(found, key=lambda each: (bool(each.reason), len(each.changed)))
        if worst.changed or worst.reason:
            yield worst


def _compared(root: Path, figure: Figure, commit: str) -> Stale:
    compared = Stale(figure, commit)
    assert figure.module is not None
    git = ["git", "-C", str(root), "diff", "--name-only", commit, "--", *subject_of(root, figure.module)]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    if done.returncode:
        return replace(compared, reason=f"git does not know commit {commit}")
    return replace(compared, changed=tuple(done.stdout.split()))


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
