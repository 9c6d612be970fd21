"""Every short figure once, compared with RESULTS.md.

    python -m benchmarks.all [--minutes 20] [--only router statedict] [--record]

Runs each command of `COMMANDS` until the time is over, and prints its figures. A figure outside the quartiles of its
row in RESULTS.md is printed again at the end, as better or worse by the row's target. A row without quartiles is
compared with a tenth around its value. `--record` writes the new figures into RESULTS.md, with today's date and the
commit that is checked out. The exit code is 1 if a figure is worse, or a command failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.figures import RESULTS, Measured, figures, with_measured
from benchmarks.processes import end, load

COMMANDS = (
    "router",
    "controller",
    "train_step --rounds 3",
    "trainer --repeats 3",
    "large --only tokens",
    "serving --rounds 1 --only history",
    "statedict --megabytes 64 512 --rounds 2",
    "whole_run --steps 12",
    "start --rounds 1",
    "generation --rounds 1",
    "serving --rounds 1 --only overhead",
    "serving --rounds 1 --only vllm",
)
"""Commands without `python -m benchmarks.`, the shortest first."""

TOLERANCE = 0.1
"""Share of a value that counts as its quartiles, if its row has none."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Figure outside its quartiles.

    Attributes:
        is_worse: By the target of its row; None without a target.
    """

    name: str
    value: float
    expected: tuple[float, float]
    is_worse: bool | None

    def __str__(self) -> str:
        verdict = {True: "worse", False: "better", None: "different"}[self.is_worse]
        low, high = self.expected
        return f"{self.name} is {self.value:g}, {verdict} than {low:g} to {high:g}"


def differences(measured: Mapping[str, float], results: str) -> Iterator[Difference]:
    """Figures that are outside the quartiles of their rows. Those that RESULTS.md lacks are left out.

    Args:
        results: Text of RESULTS.md.
    """
    for row in figures(results):
        for name, value in zip(row.names, row.values, strict=False):
            low, high = row.quartiles or sorted((value * (1 - TOLERANCE), value * (1 + TOLERANCE)))
            found = measured.get(name)
            if found is None or low <= found <= high:
                continue
            is_above = found > high
            is_worse = None if row.is_better_below is None else row.is_better_below is is_above
            yield Difference(name, found, (low, high), is_worse)


def measure(command: str, limit_s: float) -> dict[str, Measured]:
    """Run a benchmark, and return its figures by name. Its processes and its temporary files end with it.

    Raises:
        subprocess.SubprocessError: it failed, or did not end in time.
    """
    words = [sys.executable, "-m", *shlex.split(f"benchmarks.{command}")]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": folder}, start_new_session=True
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=limit_s)
        finally:
            end(process.pid)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    sys.stdout.write(output)
    lines: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {
        line["name"]: Measured(line["value"], tuple(line["quartiles"]) if line.get("rounds", 1) > 1 else None, command)
        for line in lines
        if "name" in line
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    names = list(dict.fromkeys(command.split()[0] for command in COMMANDS))
    parser.add_argument("--only", nargs="+", choices=names, metavar="BENCHMARK", help=f"any of {', '.join(names)}")
    parser.add_argument("--record", action="store_true", help="write the figures into RESULTS.md")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes < math.inf:
        parser.error(f"--minutes must be a number above 0, but is {arguments.minutes:g}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which ends the benchmark that runs
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ends = time.monotonic() + 60 * arguments.minutes
    measured: dict[str, Measured] = {}
    failed: list[str] = []
    for command in COMMANDS:
        if arguments.only is not None and command.split()[0] not in arguments.only:
            continue
        began = time.monotonic()
        try:
            measured |= measure(command, max(1.0, ends - began))
        except subprocess.SubprocessError as error:
            failed.append(f"{command}: {error}")
        print(f"{command}: {time.monotonic() - began:.0f} s, {load()}", file=sys.stderr)
    results = Path(__file__).parents[1] / RESULTS
    text = results.read_text()
    found = list(differences({name: each.value for name, each in measured.items()}, text))
    if arguments.record:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        results.write_text(with_measured(text, measured, date=str(date.today()), commit=head.stdout.strip()))
    for line in (*found, *failed):
        print(line)
    print(f"{len(measured)} figures, {len(found)} of them outside their quartiles")
    return 1 if failed or any(each.is_worse for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
