"""`titan-rl completion SHELL`: a script that completes commands and settings in a shell."""

from __future__ import annotations

import argparse

import shtab

from titan_rl.cli.options import Parser
from titan_rl.run.terminal.standard_streams import print_result
from titan_rl.run.terminal.waiting import WAITING


def set_up(parser: Parser) -> None:
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from titan_rl.cli.main import command_line  # imported late, because it imports all commands, including this one

    with WAITING.shown("listing the settings"):
        script = shtab.complete(command_line(), arguments.shell)
    print_result(script)
    return 0
