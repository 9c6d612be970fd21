"""`titan-rl sft (CONFIG.toml ... | --resume RUN) [--table.setting value ...] [--dry-run]`."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from titan_rl.cli.main import signals_end_imports
from titan_rl.cli.options import Parser
from titan_rl.core.console import Verbosity
from titan_rl.run.terminal.standard_streams import print_next_command, print_result, print_stderr
from titan_rl.run.terminal.waiting import WAITING


def set_up(parser: Parser) -> None:
    parser.add_run_config(nargs="*")
    parser.add_verbosity()
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    verbosity: Verbosity = arguments.verbosity
    waiting = WAITING.shown("checking the settings") if verbosity is not Verbosity.QUIET else nullcontext()
    with signals_end_imports(), waiting:
        from titan_rl.cli.runs import load_run

        config, resume = load_run(arguments, is_sft=True)
        # Imported after the settings have been checked, because this imports everything that the processes need.
        from titan_rl.run.sft.train import check, run_sft

    if arguments.dry_run:
        from titan_rl.config.hosts import check_own_machine
        from titan_rl.config.load import dump_config

        check_own_machine(config.hosts)
        with tempfile.TemporaryDirectory() as folder:
            ready, summary = check(config, Path(folder), resume)
        print_result(dump_config(ready, with_defaults=verbosity is Verbosity.VERBOSE))
        print_stderr(f"titan-rl: {summary}")
        print_stderr("titan-rl: ready: the settings are valid, and the model can be trained")
        settings = [f"--{name}={value}" for name, value in arguments.overrides]
        print_next_command("sft", *(["--resume", str(resume)] if resume is not None else arguments.config), *settings)
        return 0
    started_by = shlex.join(["titan-rl", *sys.argv[1:]])
    code = run_sft(config, resume, started_by=started_by, verbosity=verbosity)
    if code == 0 and verbosity is not Verbosity.QUIET and config.tasks:
        print_next_command("train", *(arguments.config or ["CONFIG.toml"]))
    return code
