"""Output to standard output and standard error, which may fail because the reader is gone or the disk is full."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from typing import TextIO

from titan_rl.core.console import Console
from titan_rl.core.plain_data import terminal_text
from titan_rl.run.terminal.waiting import WAITING


class OutputError(Exception):
    """Standard output accepts nothing more.

    Attributes:
        reason: Error of the system: a BrokenPipeError if the reader is gone.
    """

    def __init__(self, reason: OSError) -> None:
        super().__init__(f"the output cannot be written: {reason.strerror}")
        self.reason = reason


def print_result(text: str) -> None:
    """Write the result of a command to standard output, completely and without control characters.

    Raises:
        OutputError: The text could not be written completely.
    """
    WAITING.erase()
    try:
        sys.stdout.write(terminal_text(text))
        sys.stdout.flush()
    except OSError as error:
        silence(sys.stdout)
        raise OutputError(error) from None


def print_stderr(text: str) -> None:
    """Write a line about the command to standard error, without control characters. A failure is ignored."""
    WAITING.erase()
    try:
        print(terminal_text(text), file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def write_stderr_unbuffered(text: str) -> None:
    """Write a line to standard error, bypassing Python's buffers, whose locks may be held by the interrupted code."""
    with contextlib.suppress(OSError):  # the reader may be gone
        os.write(2, f"titan-rl: {terminal_text(text)}\n".encode())


class StderrConsole(Console):
    """Console that writes lines to standard error."""

    def message(self, text: str) -> None:
        print_stderr(f"titan-rl: {text}")

    def warning(self, text: str) -> None:
        print_stderr(f"titan-rl: {text}")

    def end_with(self, text: str) -> None:
        """Write a line from a signal handler, as one of the last."""
        write_stderr_unbuffered(text)


def print_next_command(*words: str) -> None:
    """Name the command to run next, as the last line of a command that succeeded."""
    print_stderr(f"titan-rl: next: {shlex.join(['titan-rl', *words])}")


def accept_any_text() -> None:
    r"""Make standard output and standard error accept any text. Characters that their encoding lacks become escapes
    such as `\xb1`. If the program was started with them closed, Python sets them to None, and the null device replaces
    them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open until the program ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def silence(stream: TextIO) -> None:
    """Redirect a stream to the null device, including what is still in its buffer. Otherwise the exit of the program
    would fail on it again."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
