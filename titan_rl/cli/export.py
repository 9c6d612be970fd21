"""`titan-rl export RUN OUT`: the policy of a run or a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from titan_rl.cli.options import Parser, file_path
from titan_rl.evaluation.policies.policy_export import export_policy
from titan_rl.run.observability.progress import status
from titan_rl.run.terminal.standard_streams import StderrConsole, print_next_command, print_result, print_stderr


def set_up(parser: Parser) -> None:
    parser.description = (
        "Write a policy as a Hugging Face folder, which transformers, vLLM and titan-rl load: the newest checkpoint of "
        "a run, or a given checkpoint, saved by any number of ranks. The result is read back and compared."
    )
    parser.add_argument(
        "policy", type=file_path, metavar="RUN", help="the folder of a run or of one of its checkpoints"
    )
    parser.add_argument("out", type=file_path, metavar="OUT", help="the folder to write, which must not exist")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="dtype of the weights (default: that of the run)"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the adapter of a run with [training.adapter], as a folder that PEFT loads; by default it is "
        "merged into its base",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="write the checkpoint of a run with the highest held-out reward instead of the newest one; "
        'checkpoint.keep = "best" keeps it',
    )
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
