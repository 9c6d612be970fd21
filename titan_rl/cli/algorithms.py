"""`titan-rl algorithms [NAME]`: the learning algorithms with their formulas, terms, requirements and sources."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

from titan_rl.cli.options import Parser
from titan_rl.run.terminal.standard_streams import print_result
from titan_rl.training.algorithms import BY_NAME, Algorithm, find_algorithm

WIDTH = 100  # columns


def set_up(parser: Parser) -> None:
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    names = [arguments.name] if arguments.name else list(BY_NAME)
    print_result("\n".join(line for name in names for line in lines(name, find_algorithm(name))))
    return 0


def lines(name: str, algorithm: Algorithm) -> Iterator[str]:
    """Describe an algorithm in lines, ending with an empty line."""
    yield f"{name}: {algorithm.about}"
    yield from _entry("advantage", f"A_i = {algorithm.advantage_formula}")
    for term in algorithm.terms():
        weight = "" if term.weight == 1 else f"{term.weight:g} * "
        yield from _entry("term", f"{term.name}: {weight}{term.formula}")
        yield from _entry("", f"divided by the {term.denominator}")
    for need in algorithm.requirements():
        yield from _entry("needs", need)
    yield from _entry("source", algorithm.source)
    yield from _entry("settings", ", ".join(f"{key} = {_toml(value)}" for key, value in algorithm.settings().items()))
    yield ""


def _entry(title: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {title:<11}", subsequent_indent=" " * 13)


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        low, high = value  # pyright: ignore[reportUnknownVariableType]
        return f"[{low:g}, {high:g}]"
    return f'"{value}"' if isinstance(value, str) else f"{value}"
