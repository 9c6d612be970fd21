"""`titan-rl export RUN OUT`: the policy of a run or a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from titan_rl.cli.options import Parser
from titan_rl.evaluation.policies.policy_export import export_policy
from titan_rl.run.observability.progress import status
from titan_rl.run.terminal.standard_streams import StderrConsole, print_next_command, print_result, print_stderr


def set_up(parser: Parser) -> None:
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out).absolute()
    with status(f"exporting {arguments.policy}"):
        options = {"as_adapter": arguments.adapter, "best": arguments.best}
        exporting = export_policy(arguments.policy, out, arguments.dtype, StderrConsole(), **options)
        name = asyncio.run(exporting)
    subject = f"the adapter of {name}" if arguments.adapter else name
    print_stderr(f"titan-rl: {subject} is written and verified")
    print_result(f"{out}\n")
    if not arguments.adapter:
        print_next_command("serve", str(out))
    return 0
