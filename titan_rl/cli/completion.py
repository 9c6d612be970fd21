"""`titan-rl completion SHELL`: what completes commands and settings in a shell."""

from __future__ import annotations

import argparse
from functools import partial

import shtab

from titan_rl.cli.options import Parser
from titan_rl.run.terminal.standard_streams import say


def set_up(parser: Parser, of: Parser) -> None:
    """
    Args:
        of: the whole command line.
    """
    parser.description = "Print a script that completes titan-rl's commands and settings, for a shell to read."
    parser.epilog = 'for instance, in ~/.bashrc:  eval "$(titan-rl completion bash)"'
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    parser.set_defaults(run=partial(run, of))


def run(of: Parser, arguments: argparse.Namespace) -> int:
    say(shtab.complete(of, arguments.shell))
    return 0
