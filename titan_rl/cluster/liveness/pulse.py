"""A process answers pings from a thread of its own, and says with each answer how its work gets on."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

PING = b"?"
HELLO = struct.Struct("=Q")  # the pid
ANSWER = struct.Struct("=Q?")  # moves so far, and whether something is being worked at


class Duty:
    """What the thread does that matters in a process: it begins something, gets on, and ends it. For one such thread;
    asked from any."""

    def __init__(self) -> None:
        self._moves = 0
        self._begun = 0

    @contextmanager
    def going_on(self) -> Generator[None]:
        """For the length of the block something is worked at, and has to get on. Each block is a move."""
        self._begun += 1
        self._moves += 1
        try:
            yield
        finally:
            self._begun -= 1
            self._moves += 1

    @property
    def answer(self) -> bytes:
        """What a ping is answered with."""
        return ANSWER.pack(self._moves % 2**64, self._begun > 0)


def begin_pulse(path: Path, duty: Duty) -> None:
    """Answer the pings of whoever listens at a socket of this host, for as long as this process lives. Once nobody
    listens there any more, this process ends: nobody would know of it.

    Raises:
        OSError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.sendall(HELLO.pack(os.getpid()))
    threading.Thread(target=_answer, args=(connection, duty), name="pulse", daemon=True).start()


def _answer(connection: socket.socket, duty: Duty) -> None:
    with connection, suppress(OSError):
        while connection.recv(1):
            connection.sendall(duty.answer)
    os._exit(1)
