"""An append-only file of records that survives the death of its writer. Knows nothing of what is in them.

Each record is its length and its CRC-32, both four bytes, little-endian, then its bytes. A record that is torn, because
its writer was killed, ends the log: nothing after it can be trusted.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

from titan_rl.errors import CheckpointError

_HEADER = struct.Struct("<II")
_CLOSE_TIMEOUT_S = 30.0


def read_log(path: Path) -> Iterator[bytes]:
    """The whole records of a file, in order; none where it does not exist."""
    yield from (record for record, _ in _scan(path))


def cut_torn_record(path: Path) -> int:
    """Drop what follows the last whole record, so that the file can be appended to.

    Returns:
        bytes dropped.
    """
    if not path.exists():
        return 0
    end = 0
    for _, end in _scan(path):  # noqa: B007  the last one counts
        pass
    torn = path.stat().st_size - end
    if torn:
        os.truncate(path, end)
    return torn


def _scan(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each whole record and the position behind it."""
    if not path.exists():
        return
    position = 0
    with path.open("rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            record = file.read(length)
            if len(record) != length or zlib.crc32(record) != checksum:
                return
            position += _HEADER.size + length
            yield record, position


class LogWriter:
    """Appends to one file at a time from a thread of its own: `append` never waits for the disk.

    What was appended survives a SIGKILL of this process once the thread has written it, usually within milliseconds,
    and a loss of power after `switch` or `close`, which flush to disk.

    Args:
        max_pending_bytes: records that wait for the disk, at most; more is an error, since memory is not endless.

    Raises:
        CheckpointError: from every call after a write has failed, with the cause.
    """

    def __init__(self, path: Path, *, max_pending_bytes: int = 1 << 28) -> None:
        self._max_pending_bytes = max_pending_bytes
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[bytes | Path | threading.Event | None] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._write, args=(path,), name="journal", daemon=True)
        self._thread.start()

    def append(self, record: bytes) -> None:
        """Queue one record."""
        with self._lock:
            self._pending_bytes += len(record)
            pending = self._pending_bytes
        if pending > self._max_pending_bytes:
            raise CheckpointError(
                f"{pending} bytes of the journal wait for the disk, more than {self._max_pending_bytes}: it is too slow"
            )
        self._queue.put(_HEADER.pack(len(record), zlib.crc32(record)) + record)
        self._raise_failure()

    def switch(self, path: Path) -> None:
        """Flush the present file; later records go to the end of `path`."""
        self._queue.put(path)
        self._raise_failure()

    def drain(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Wait until everything queued is written.

        Raises:
            CheckpointError: it was not within the limit.
        """
        done = threading.Event()
        self._queue.put(done)
        if not done.wait(timeout_s):
            raise CheckpointError(f"the journal was not written within {timeout_s:g} s")
        self._raise_failure()

    def close(self) -> None:
        """Write and flush what is queued, and end."""
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise CheckpointError(f"the journal could not be written: {self._failure}") from self._failure

    def _write(self, path: Path) -> None:
        try:
            file = path.open("ab", buffering=0)
            while (item := self._queue.get()) is not None:
                if isinstance(item, bytes):
                    file.write(item)
                    with self._lock:
                        self._pending_bytes -= len(item) - _HEADER.size
                elif isinstance(item, Path):
                    os.fsync(file.fileno())
                    file.close()
                    file = item.open("ab", buffering=0)
                else:
                    item.set()
            os.fsync(file.fileno())
            file.close()
        except OSError as error:
            self._failure = error
            self._release_waiters()

    def _release_waiters(self) -> None:
        """Nobody waits for a thread that has ended."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
