"""`titan-rl doctor [--json]`: check what this machine lacks for a run, and name the command that fixes it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import msgspec

from titan_rl.cli.options import Parser
from titan_rl.run.machine.checkup import Finding, check_up
from titan_rl.run.terminal.standard_streams import say, tell, tell_next


def set_up(parser: Parser) -> None:
    parser.description = (
        "Check the machine and the installed packages: what a run needs and can use, and how to add what is missing. "
        "The exit code is 1 if a run cannot start."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    missing = 0
    for finding in check_up():
        missing += finding.state == "missing"
        say(_as_json(finding) if arguments.json else _as_text(finding))
    tell(f"titan-rl: {f'{missing} of these prevent a run from starting' if missing else 'a run can start here'}")
    if not missing:
        tell_next("init", "NAME")
    return 1 if missing else 0


def _as_json(finding: Finding) -> str:
    return msgspec.json.encode(asdict(finding)).decode() + "\n"


def _as_text(finding: Finding) -> str:
    fix = f"\n{'':27}-> {finding.fix}" if finding.fix else ""
    return f"{finding.state:8} {finding.subject:18}{finding.found}{fix}\n"
