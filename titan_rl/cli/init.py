"""`titan-rl init NAME`: a package of one's own, with a task that can be learned as it is."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import get_args

from titan_rl.cli.options import Parser, file_path
from titan_rl.cli.starter.examples import copy_example, example_names
from titan_rl.cli.starter.write import TEMPLATES, Starter, write_starter
from titan_rl.run.terminal.standard_streams import say, tell
from titan_rl.training.tiny_model.vocabulary import Level


def set_up(parser: Parser) -> None:
    parser.description = (
        "Make a folder NAME with a task of your own: samples, rewards, demonstrations, settings, tests, a README. It "
        "can be learned on two cores in a minute or two as it is; change it step by step. Prints the files."
    )
    parser.add_argument("name", type=file_path, metavar="NAME", help="the folder to make, and the Python package in it")
    parser.add_argument(
        "--template",
        choices=TEMPLATES,
        default="single",
        help="one prompt and one answer, a conversation of several turns, or tools that the policy calls "
        "(default: single)",
    )
    parser.add_argument(
        "--example",
        metavar="EXAMPLE",
        help=f"copy an example instead, under the name NAME: {', '.join(example_names())}",
    )
    parser.add_argument(
        "--model",
        type=file_path,
        metavar="FOLDER",
        help="train this Hugging Face folder; by default a tiny model is made by titan-rl sft",
    )
    parser.add_argument(
        "--level",
        choices=get_args(Level),
        default="word",
        help="what a token of the tiny model is: a byte, or also a word of the task (default: word)",
    )
    parser.add_argument(
        "--size", type=int, default=250_000, metavar="PARAMETERS", help="of the tiny model (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.example is not None:
        return _copy(arguments.example, Path(arguments.name))
    model = None if arguments.model is None else Path(arguments.model)
    starter = Starter(Path(arguments.name), arguments.template, model, arguments.level, arguments.size)
    for path in write_starter(starter):
        say(f"{path}\n")
    folder = shlex.quote(str(starter.folder))
    first = "sft config.toml" if model is None else "train config.toml --dry-run"
    tell(f"titan-rl: to go on:  cd {folder} && titan-rl {first}")
    return 0


def _copy(example: str, folder: Path) -> int:
    for path in copy_example(example, folder):
        say(f"{path}\n")
    settings = shlex.quote(str(folder / "cpu.toml"))
    if (folder / "base").is_dir():
        first = f"titan-rl train {settings}"
    elif (folder / "base_model.py").is_file():
        first = f"python -m {folder.name}.base_model --out {shlex.quote(str(folder / 'base'))}"
    else:
        first = f"titan-rl sft {settings}"
    tell(f"titan-rl: to go on:  {first}")
    return 0
