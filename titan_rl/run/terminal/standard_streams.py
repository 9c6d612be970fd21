"""Standard output and standard error where nobody reads them any more, or where their disk is full."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from typing import TextIO

from titan_rl.core.calls.plain import terminal_text
from titan_rl.core.console import Console
from titan_rl.run.terminal.waiting import WAITING


class OutputError(Exception):
    """Standard output takes nothing more.

    Attributes:
        reason: what the system says; a BrokenPipeError where nobody reads it.
    """

    def __init__(self, reason: OSError) -> None:
        super().__init__(f"the output cannot be written: {reason.strerror}")
        self.reason = reason


def say(text: str) -> None:
    """Write what a command was asked for to standard output, to the last byte, without control characters.

    Raises:
        OutputError: Not all of it could be written.
    """
    WAITING.erase()
    try:
        sys.stdout.write(terminal_text(text))
        sys.stdout.flush()
    except OSError as error:
        silence(sys.stdout)
        raise OutputError(error) from None


def tell(text: str) -> None:
    """Write a line about the command to standard error, without control characters, if that can be."""
    WAITING.erase()
    try:
        print(terminal_text(text), file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def tell_on_stderr(text: str) -> None:
    """Write a line to standard error, bypassing Python's buffers, whose locks may be held by the interrupted code."""
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, f"titan-rl: {terminal_text(text)}\n".encode())


class StderrConsole(Console):
    """Console that writes lines to standard error."""

    def message(self, text: str) -> None:
        tell(f"titan-rl: {text}")

    def warning(self, text: str) -> None:
        tell(f"titan-rl: {text}")

    def end_with(self, text: str) -> None:
        """Write a line from a signal handler, as one of the last."""
        tell_on_stderr(text)


def tell_next(*words: str) -> None:
    """Name the command to run next, as the last line about a command that ended well."""
    tell(f"titan-rl: next: {shlex.join(['titan-rl', *words])}")


def replace_closed_streams() -> None:
    """A program that was started with standard output or error closed has None in their places; let nowhere take what
    it writes."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  it lasts as long as the program


def silence(stream: TextIO) -> None:
    """Let nowhere take what a stream holds and gets: else the program's end fails on it once more."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
