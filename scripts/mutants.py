#!/usr/bin/env python3
"""Apply each mutant of tests/mutants.toml to a copy of the repository, and report those that no test notices.

    python scripts/mutants.py                        # all mutants, two at a time
    python scripts/mutants.py scheduling journal     # those whose file has one of these words in its path

A mutant is one changed line: a fault that somebody could introduce. `before` must occur exactly once in `file`, so a
mutant whose line has changed is reported and has to be adapted. `tests` are the files that should notice it. A mutant
that changes no behaviour says why in `equivalent`; it is only checked for its line. The last line of the output is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
COPIED = (
    "titan_rl",
    "tests",
    "examples",
    "scripts",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
)
LIMIT_S = 600.0  # a mutant that hangs is noticed, too


@dataclass(frozen=True, slots=True)
class Mutant:
    """One entry of the table."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.before.strip()} -> {self.after.strip() or '(removed)'}"


def load(words: list[str]) -> list[Mutant]:
    """Read the mutants whose file has one of these words in its path; all if there are no words.

    Raises:
        SystemExit: A mutant's line does not occur exactly once, or a test file does not exist.
    """
    entries = tomllib.loads(TABLE.read_text())["mutant"]
    mutants = [Mutant(**entry | {"tests": tuple(entry.get("tests", ()))}) for entry in entries]
    problems = list[str]()
    for mutant in mutants:
        if (count := (ROOT / mutant.file).read_text().count(mutant.before)) != 1:
            problems.append(f"{mutant}: the line occurs {count} times")
        problems += [f"{mutant}: there is no {test}" for test in mutant.tests if not (ROOT / test).exists()]
    if problems:
        sys.exit("\n".join(problems))
    return [mutant for mutant in mutants if not words or any(word in mutant.file for word in words)]


def copies(count: int, folder: Path) -> Iterator[Path]:
    for number in range(count):
        copy = folder / str(number)
        copy.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
            else:
                shutil.copy(source, copy)
        yield copy


def noticed_by(mutant: Mutant, copy: Path) -> str:
    """Run the mutant's tests on a copy of the repository, and return the first that fails; "" if all pass."""
    path = copy / mutant.file
    original = path.read_text()
    path.write_text(original.replace(mutant.before, mutant.after))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a hang of {LIMIT_S:g} s"
    finally:
        path.write_text(original)
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {done.returncode}: {(done.stdout + done.stderr)[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of the files' paths")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at once; default: 2")
    given = parser.parse_args()
    mutants = load(given.words)
    tested = [mutant for mutant in mutants if not mutant.equivalent]
    survivors = list[Mutant]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in copies(given.jobs, Path(folder)):
            free.put(copy)

        def test(mutant: Mutant) -> str:
            copy = free.get()
            try:
                return noticed_by(mutant, copy)
            finally:
                free.put(copy)

        for mutant, test_name in zip(tested, pool.map(test, tested), strict=True):
            print(f"{test_name or 'SURVIVES':<60} {mutant}", flush=True)
            if not test_name:
                survivors.append(mutant)
    figures = {
        "mutants": len(tested),
        "noticed": len(tested) - len(survivors),
        "equivalent": len(mutants) - len(tested),
    }
    print(json.dumps(figures))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
