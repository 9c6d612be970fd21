"""The command line, `titan-rl COMMAND ...`: its commands and their exit codes.

Almost nothing is imported before `main` runs, because Ctrl-C during an import ends a program with a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager

from titan_rl.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREAD, EXIT_USAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import FrameType

    from titan_rl.cli.options import Parser

ENDS = (signal.SIGTERM, signal.SIGHUP)
STOPPED_EARLY = "stopped before a run began"


def program() -> int:
    """Entry point of the program: `main`, followed by the end of the process."""
    code = main()
    if code > 128:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once, without a traceback
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. The signal handlers of the process are restored.

    The exit code is 0 for success, 1 for a failure, 2 for wrong settings or arguments, 130 for Ctrl-C, 143 for SIGTERM,
    129 for SIGHUP, and 141 for a closed output pipe.
    """
    stopped = [STOPPED_EARLY]
    with _signals_unwind():
        try:
            return _run_command(sys.argv[1:] if argv is None else argv, stopped)
        except KeyboardInterrupt as stop:
            from titan_rl.run.terminal.standard_streams import print_stderr

            print_stderr(f"titan-rl: {stopped[-1]}")
            return stop.code if isinstance(stop, _Terminated) else EXIT_INTERRUPTED


def _run_command(words: Sequence[str], stopped: list[str]) -> int:
    """Parse the command line and run the command.

    Args:
        stopped: List that receives the command's own message for being stopped, if it has one.
    """
    from titan_rl.core.errors import ConfigError, ModelError, TitanRLError
    from titan_rl.run.terminal.standard_streams import OutputError, accept_any_text, print_stderr
    from titan_rl.run.terminal.waiting import WAITING

    accept_any_text()
    try:
        command = words[0] if words else ""
        with signals_end_imports(), WAITING.shown(f"loading {command}"):
            arguments = command_line(command).parse_args(words)
        if (message := getattr(arguments, "stopped", None)) is not None:
            stopped.append(message)
        _check_current_folder()
        return arguments.run(arguments)
    except OutputError as error:
        if isinstance(error.reason, BrokenPipeError):  # for example by `| head`
            return EXIT_UNREAD
        print_stderr(f"titan-rl: {error}")
        return EXIT_FAILED
    except (ConfigError, ModelError) as error:
        _print_error(error)
        return EXIT_USAGE
    except TitanRLError as error:
        _print_error(error)
        return EXIT_FAILED


def _check_current_folder() -> None:
    from titan_rl.core.errors import ConfigError

    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the current folder cannot be used: {error.strerror}; change to another folder") from None


def command_line(command: str | None = None) -> Parser:
    """Make the parser of the command line.

    Args:
        command: The only command that gets its options, because importing all commands takes a second. By default all
            commands get their options, and their settings are declared, too.
    """
    import tomllib
    from importlib import import_module
    from importlib.resources import files

    from titan_rl.cli.options import Parser, Version

    parser = Parser(prog="titan-rl", description="Reinforcement learning of language models.")
    parser.add_argument("--version", action=Version, nargs=0, help="print the version of titan-rl, and stop")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, table in tomllib.loads(files("titan_rl.cli").joinpath("commands.toml").read_text("utf-8")).items():
        added = commands.add_parser(name, help=table["summary"])
        if command is None or name == command:
            added.declare(table)
            import_module(f"titan_rl.cli.{name}").set_up(added)
        if command is None:
            added.declare_settings()
    return parser


def _print_error(error: BaseException) -> None:
    """Print an error with its causes and notes, without a traceback."""
    from asyncio import CancelledError

    from titan_rl.core.calls.user_code import reason, summary, with_causes
    from titan_rl.run.terminal.standard_streams import print_stderr

    print_stderr(f"titan-rl: {reason(error)}")
    printed = str(error)
    for cause in with_causes(error):
        is_quoted = str(cause) and str(cause) in printed  # messages often quote their cause
        if cause is error or is_quoted or isinstance(cause, BaseExceptionGroup | CancelledError):
            continue
        print_stderr(f"  caused by {summary(cause)}")
        printed += str(cause)
    for note in getattr(error, "__notes__", ()):
        print_stderr(f"  {note}")


class _Terminated(KeyboardInterrupt):
    """Exception raised when SIGTERM or SIGHUP arrives. asyncio passes on no other exceptions of signal handlers."""

    def __init__(self, number: int) -> None:
        self.code = 128 + number


@contextmanager
def _signals_unwind() -> Generator[None]:
    """Context manager in which SIGTERM and SIGHUP end the program like Ctrl-C: by an exception, so that every `finally`
    runs. `nohup` ignores SIGHUP, and so does the program then."""

    def raise_terminated(signum: int, frame: FrameType | None) -> None:
        raise _Terminated(signum)

    ended_by = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, raise_terminated) for number in ended_by}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def signals_end_imports() -> Generator[None]:
    """Context manager in which Ctrl-C, SIGTERM or SIGHUP during an import ends the process at once. An exception would
    be lost within the import of a native module, become another error, or crash Python.

    No resource may be held during an import in the block. At other times the signals raise their exceptions.
    """
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDS)}

    def end(signum: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            waiting = getattr(sys.modules.get("titan_rl.run.terminal.waiting"), "WAITING", None)
            if waiting is not None:
                waiting.erase()
            try:
                os.write(2, f"titan-rl: {STOPPED_EARLY}\n".encode())
            finally:
                os._exit(128 + signum)
        raises = previous[signal.Signals(signum)]
        assert callable(raises)
        raises(signum, frame)

    replaced = [number for number, handler in previous.items() if callable(handler)]
    for number in replaced:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, previous[number])


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


if __name__ == "__main__":
    sys.exit(program())
