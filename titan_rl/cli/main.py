"""The command line: `titan-rl train (CONFIG.toml | --resume RUN) [--table.setting value ...] [--dry-run]`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, cast

from titan_rl.calls.output import OutputError, replace_closed_streams, say, tell
from titan_rl.calls.user_code import reason, summary
from titan_rl.cli.overrides import check_resume, split_overrides
from titan_rl.cli.run_folder import CONFIG, find_run
from titan_rl.config.concurrency import throttles
from titan_rl.config.load import dump_config, load_config
from titan_rl.config.reference import reference
from titan_rl.errors import ConfigError, ModelError, TitanRLError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_UNREAD = 128 + signal.SIGPIPE

FLAGS = ("--help", "-h", "--dry-run")
OPTIONS = ("--resume",)  # of the command itself, each with a value


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 1 a failure, 2 wrong settings or arguments, 130 Ctrl-C, 143 SIGTERM, and 141 that nobody reads what
    was to be printed.
    """
    replace_closed_streams()
    with _sigterm_unwinds():
        try:
            code = _dispatch(list(sys.argv[1:] if argv is None else argv))
            if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more ends what is left of the exit, without a word
            return code
        except (KeyboardInterrupt, _Terminated) as stop:
            tell("titan-rl: stopped before a run began")
            return EXIT_INTERRUPTED if isinstance(stop, KeyboardInterrupt) else EXIT_TERMINATED
        except OutputError as error:
            if isinstance(error.reason, BrokenPipeError):  # as `| head` does; it has what it wanted
                return EXIT_UNREAD
            tell(f"titan-rl: {error}")
            return EXIT_FAILED
        except (ConfigError, ModelError) as error:
            _say_error(error)
            return EXIT_USAGE
        except TitanRLError as error:
            _say_error(error)
            return EXIT_FAILED


def _dispatch(argv: list[str]) -> int:
    overrides: list[tuple[str, str]] = []
    if argv[:1] == ["train"]:
        rest, overrides = split_overrides(argv[1:], flags=FLAGS, options=OPTIONS)
        argv = ["train", *rest]
    arguments = _parser().parse_args(argv)
    if (arguments.resume is None) == (arguments.config is None):
        raise ConfigError("train needs either CONFIG.toml, or --resume RUN with the folder of an earlier run")
    resume = None if arguments.resume is None else find_run(arguments.resume)
    config = load_config(arguments.config if resume is None else resume / CONFIG, overrides)
    if resume is not None:
        check_resume(overrides)
    for warning in throttles(config):
        tell(f"titan-rl: warning: {warning}")
    if arguments.dry_run:
        say(dump_config(config))
        return 0
    # Not before the settings are known to be right: what starts processes also imports what they need.
    from titan_rl.run.launch import run_training

    return run_training(config, resume)


class _Parser(argparse.ArgumentParser):
    """Prints as the rest of the command does."""

    def print_help(self, file: object = None) -> None:
        say(self.format_help())

    def error(self, message: str) -> NoReturn:
        tell(f"{self.format_usage()}{self.prog}: error: {message}")
        self.exit(EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="titan-rl", description="Reinforcement learning of language models.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a policy",
        usage="titan-rl train (CONFIG.toml | --resume RUN) [--table.setting value ...] [--dry-run]",
        description="Train the policy that CONFIG.toml describes. An option --table.setting value, or "
        "--table.setting=value, replaces what the file says.",
        epilog=f"settings and their defaults:\n\n{reference()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    train.add_argument("config", metavar="CONFIG.toml", nargs="?", help="the run's settings")
    train.add_argument(
        "--resume", metavar="RUN", help="continue the run in this folder from its newest checkpoint and its journal"
    )
    train.add_argument("--dry-run", action="store_true", help="check everything, print the resolved settings, and stop")
    return parser


def _say_error(error: BaseException) -> None:
    """The error, what caused it and what can be done, without the traceback: each is meant to be read by the user."""
    tell(f"titan-rl: {reason(error)}")
    said = str(error)
    for cause in causes(error):
        if str(cause) and str(cause) in said:  # a message often quotes the one below it
            continue
        tell(f"  caused by {summary(cause)}")
        said += str(cause)
    for note in getattr(error, "__notes__", ()):
        tell(f"  {note}")


def causes(error: BaseException) -> Iterator[BaseException]:
    """What an error says it was caused by, the nearest first. Of several at once each has its turn; the groups that
    hold them and cancellations say nothing to a user, and are left out."""
    seen = {id(error)}
    waiting = [error.__cause__]
    while waiting:
        cause = waiting.pop(0)
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        if isinstance(cause, BaseExceptionGroup):
            waiting[:0] = cast("BaseExceptionGroup[BaseException]", cause).exceptions
            continue
        if not isinstance(cause, asyncio.CancelledError):
            yield cause
        waiting.append(cause.__cause__)


class _Terminated(BaseException):
    """SIGTERM arrived."""


@contextmanager
def _sigterm_unwinds() -> Generator[None]:
    """Let SIGTERM end the program as Ctrl-C does: by an exception that runs every `finally` on its way."""

    def raise_terminated(signum: int, frame: FrameType | None) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
