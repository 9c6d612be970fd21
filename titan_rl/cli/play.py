"""`titan-rl play CONFIG.toml [--policy RUN]`."""

from __future__ import annotations

import argparse
import io
import json
import sys
from typing import TextIO

from titan_rl.cli.options import Parser
from titan_rl.config.evaluation import EvalConfig, make_eval_config
from titan_rl.config.load import load_config
from titan_rl.core.errors import ConfigError
from titan_rl.evaluation.play.command import SampleSelection, play
from titan_rl.run.process.signals import run_to_its_end
from titan_rl.run.terminal.standard_streams import StderrConsole, print_next_command, print_result, print_stderr


def set_up(parser: Parser) -> None:
    parser.add_run_config()
    parser.add_options(EvalConfig, leave_out=("num_prompts", "samples", "tasks", "success", "in_flight"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.sample < 0 or arguments.count < 1:
        raise ConfigError(
            f"--sample {arguments.sample} --count {arguments.count}: give a sample of at least 0, a count of at least 1"
        )
    settings = make_eval_config(arguments.options)
    config = load_config(arguments.config, arguments.overrides, check_files=False)
    selection = SampleSelection(arguments.task, arguments.sample, arguments.count, arguments.validation)
    typed = _standard_input()
    is_terminal = typed.isatty() and sys.stdout.isatty()

    def show(text: str) -> None:
        is_question = is_terminal and text.endswith("> ")
        print_result(text if is_question else f"{text}\n")

    run_to_its_end(
        play(
            config,
            selection,
            settings,
            arguments.policy,
            write_line=show,
            console=StderrConsole(),
            lines=typed,
            is_terminal=is_terminal,
        )
    )
    print_stderr("titan-rl: played")
    print_next_command("play", *arguments.config, *_options_of_next(arguments))
    return 0


def _options_of_next(arguments: argparse.Namespace) -> list[str]:
    """Make the options of the command that plays the next samples."""
    options = ["--sample", str(arguments.sample + arguments.count)]
    if arguments.count != 1:
        options += ["--count", str(arguments.count)]
    if arguments.policy is not None:
        options += ["--policy", arguments.policy]
    if arguments.validation:
        options.append("--validation")
    if arguments.task is not None:
        options += ["--task", arguments.task]
    for name, value in arguments.options.items():
        options.append(f"--{name.replace('_', '-')}={value if isinstance(value, str) else json.dumps(value)}")
    return [*options, *(f"--{name}={value}" for name, value in arguments.overrides)]


def _standard_input() -> TextIO:
    """Return standard input; an empty stream if it is closed."""
    given: TextIO | None = sys.stdin
    return io.StringIO() if given is None or given.closed else given
