"""--quiet and --verbose, of commands that run long."""

from __future__ import annotations

import argparse

from titan_rl.cli.options import Parser
from titan_rl.run.observability.progress import Verbosity


def add_verbosity(parser: Parser) -> None:
    either = parser.add_mutually_exclusive_group()
    either.add_argument("-q", "--quiet", action="store_true", help="show warnings and what it comes to, nothing else")
    either.add_argument("-v", "--verbose", action="store_true", help="also show what is written to the log")


def verbosity_of(arguments: argparse.Namespace) -> Verbosity:
    if arguments.quiet:
        return Verbosity.QUIET
    return Verbosity.VERBOSE if arguments.verbose else Verbosity.NORMAL
