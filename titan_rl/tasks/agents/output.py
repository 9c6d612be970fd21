"""What a program prints, kept within bounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

TAIL_BYTES = 4096
_READ_BYTES = 65536


class BoundedOutput:
    """Reads a pipe into a file: the first bytes of it, and at the end its last. Made by `bounded_output`.

    Attributes:
        descriptor: to write to.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._read, self.descriptor = os.pipe()
        os.set_blocking(self._read, False)
        self._file = path.open("wb")
        self._room = limit
        self._left_out = 0
        self._tail = b""
        self._loop.add_reader(self._read, self._take)

    @property
    def tail(self) -> str:
        """The last that was printed."""
        return self._tail.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Nobody writes any more."""
        while self._take():
            pass
        self._loop.remove_reader(self._read)
        os.close(self._read)
        os.close(self.descriptor)
        if self._left_out > len(self._tail):
            self._file.write(f"\n... {self._left_out - len(self._tail)} bytes are left out ...\n".encode())
        self._file.write(self._tail[max(0, len(self._tail) - self._left_out) :])
        with suppress(OSError):  # the disk is full
            self._file.close()

    def _take(self) -> bool:
        try:
            data = os.read(self._read, _READ_BYTES)
        except BlockingIOError:
            return False
        kept = data[: self._room]
        self._room -= len(kept)
        self._left_out += len(data) - len(kept)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        with suppress(OSError):
            self._file.write(kept)
        return bool(data)


@contextmanager
def bounded_output(path: Path, limit: int) -> Generator[BoundedOutput]:
    """
    Args:
        limit: bytes of its beginning that are kept; of the rest the last `TAIL_BYTES` are.
    """
    output = BoundedOutput(path, limit)
    try:
        yield output
    finally:
        output.close()
