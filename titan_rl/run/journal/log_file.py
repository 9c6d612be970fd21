"""Log files whose records survive the death of their writer: the file format, its reader, and a writer with a thread.

A record consists of `MAGIC`, its length, and a CRC-32 of length and bytes, four bytes each, little-endian; then its
bytes, and `END`. Zeros are therefore not a record, and appended bytes do not complete a torn one. A file is never
truncated: if some bytes are not a record, because the writer was killed, power was lost, or the disk changed them, a
reader continues at the next whole record.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import mmap
import os
import queue
import stat
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

from titan_rl.core.errors import CheckpointError, NoSpaceError, means_no_space

MAGIC = b"\xffTR\xfe"  # cannot occur in UTF-8 text
END = b"\n"
_HEADER = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")

KEPT_BYTES = 1 << 24
"""Most bytes of a file that stay in memory after they have been read."""


class Damage(NamedTuple):
    """Range of bytes in a file that are not a record."""

    offset: int
    size: int


def read_log(path: Path, damages: list[Damage] | None = None) -> Iterator[bytes]:
    """Iterate over the whole records of a file, in order. A missing file has none.

    Args:
        damages: List to which the skipped parts of the file are appended.

    Raises:
        OSError: The file cannot be read, or is not a regular file: a pipe might never end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size:
            yield from _records_in(descriptor, [] if damages is None else damages)
    finally:
        os.close(descriptor)


def _records_in(descriptor: int, damages: list[Damage]) -> Iterator[bytes]:
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        position = dropped = 0
        while position < len(data):
            if position - dropped >= KEPT_BYTES:
                until = position - position % mmap.PAGESIZE
                data.madvise(mmap.MADV_DONTNEED, dropped, until - dropped)
                dropped = until
            if (record := _record_at(data, position)) is None:
                start = position
                position = _next_record(data, start + 1)
                damages.append(Damage(start, position - start))
            else:
                yield record
                position += _HEADER.size + len(record) + len(END)


def frame(record: bytes) -> bytes:
    """Encode one record as its bytes in a file."""
    return _HEADER.pack(MAGIC, len(record), _checksum(record)) + record + END


def _record_at(data: mmap.mmap, position: int) -> bytes | None:
    if len(data) - position < _HEADER.size:
        return None
    magic, length, checksum = _HEADER.unpack_from(data, position)
    end = position + _HEADER.size + length
    if magic != MAGIC or data[end : end + len(END)] != END:
        return None
    record = data[position + _HEADER.size : end]
    return record if _checksum(record) == checksum else None


def _next_record(data: mmap.mmap, position: int) -> int:
    """Position of the next whole record; the end of the file if there is none."""
    while (position := data.find(MAGIC, position)) >= 0:
        if _record_at(data, position) is not None:
            return position
        position += 1
    return len(data)


def _checksum(record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(_LENGTH.pack(len(record))))


logger = logging.getLogger(__name__)

R = TypeVar("R")

RETRY_S = 0.5
"""Seconds between attempts to write to a full disk."""


class LogWriter:
    """Writer that appends to one file at a time from its own thread, so that `append` never waits for the disk.

    A record survives a SIGKILL of this process once the thread has written it, usually within milliseconds. It survives
    a loss of power after `drain`, `switch` or `close`, which flush to disk. While the disk is full, records wait in
    memory.

    Args:
        max_pending_bytes: Size of the pending records, in bytes, above which `room` waits.
        stall_s: Longest time that the disk may accept nothing, in seconds.

    Raises:
        CheckpointError: A write has failed. Every call after that raises this error, with the cause.
    """

    def __init__(self, path: Path, *, max_pending_bytes: int = 1 << 28, stall_s: float = 60.0) -> None:
        self._folder = path.parent
        self._max_pending_bytes = max_pending_bytes
        self._stall_s = stall_s
        self._lock = threading.Lock()  # guards the next three attributes
        self._pending_bytes = 0
        self._progress = 0  # grows with everything that the disk accepts
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []  # callers of `room`
        self._queue: queue.SimpleQueue[bytes | Path | threading.Event | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._full: OSError | None = None  # set while the disk is full
        self._num_refusals = 0  # failed attempts because the disk was full
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, args=(path,), name="journal", daemon=True)
        self._thread.start()

    def append(self, record: bytes) -> None:
        """Queue one record. Callers with many records should await `room` first, because memory is limited."""
        self._raise_failure()
        framed = frame(record)
        with self._lock:
            self._pending_bytes += len(framed)
        self._queue.put(framed)

    async def room(self) -> None:
        """Wait while more than `max_pending_bytes` are pending.

        Raises:
            CheckpointError: The disk has accepted nothing for `stall_s`.
        """
        while True:
            self._raise_failure()
            loop = asyncio.get_running_loop()
            with self._lock:
                if self._pending_bytes <= self._max_pending_bytes:
                    return
                progress, has_room = self._progress, loop.create_future()
                self._waiting.append((loop, has_room))
            try:
                async with asyncio.timeout(self._stall_s):
                    await has_room
            except TimeoutError:
                self._raise_stalled(progress)

    def switch(self, path: Path) -> None:
        """Flush the current file. Later records are appended to `path`."""
        self._raise_failure()
        self._queue.put(path)

    def drain(self) -> None:
        """Block until everything queued is flushed to the disk, so that it survives a loss of power.

        Raises:
            NoSpaceError: The disk is full.
            CheckpointError: The disk has accepted nothing for `stall_s`, or the interpreter is exiting and has stopped
                the thread.
        """
        self._raise_failure()
        done = threading.Event()
        self._queue.put(done)
        progress, since, refusals = self._progress, time.monotonic(), self._num_refusals
        while not (self._thread_is_gone() or done.wait(min(self._stall_s, RETRY_S))):
            if self._full is not None and self._num_refusals >= refusals + 2:  # the second is surely a later attempt
                self._raise_stalled(progress)
            elif self._progress != progress:
                progress, since = self._progress, time.monotonic()
            elif time.monotonic() - since >= self._stall_s:
                self._raise_stalled(progress)
        self._raise_failure()
        if not done.is_set():
            raise CheckpointError(f"the journal's thread has ended; {self._pending_bytes} bytes are not on the disk")

    def close(self) -> None:
        """Block until everything queued is on the disk, and end the thread."""
        try:
            self.drain()
        finally:
            self._closing.set()
            self._queue.put(None)
            if not self._thread_is_gone():
                self._thread.join(1.0)  # it has nothing left to do, unless a call of the disk hangs

    def _thread_is_gone(self) -> bool:
        return sys.is_finalizing() or not self._thread.is_alive()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise CheckpointError(f"the journal could not be written: {self._failure}") from self._failure

    def _raise_stalled(self, progress: int) -> None:
        if self._full is not None:
            raise NoSpaceError(f"no space left in {self._folder}: {self._pending_bytes} bytes of the journal wait")
        if self._progress == progress:
            raise CheckpointError(
                f"nothing could be written to the journal for {self._stall_s:g} s; {self._pending_bytes} bytes are "
                "waiting"
            )

    def _write(self, path: Path) -> None:
        item: bytes | Path | threading.Event | None = b""
        try:
            file = self._with_room(lambda: _open(path))
            while (item := self._queue.get()) is not None:
                if isinstance(item, bytes):
                    rest = memoryview(item)
                    while rest:
                        rest = rest[self._with_room(partial(file.write, rest)) :]
                    self._took(len(item))
                elif isinstance(item, Path):
                    self._flush_and_close(file)
                    file = self._with_room(partial(_open, item))
                    self._took(0)
                else:
                    self._flush(file)
                    item.set()
            self._flush_and_close(file)
        except Exception as error:
            self._failure = error
            self._took(0)
            self._release_waiters(item)

    def _flush(self, file: FileIO) -> None:
        """Flush a file to the disk, which may report only now that it is full. If a part is lost then, a reader skips
        it, and only recorded answers are lost."""
        self._with_room(lambda: os.fsync(file.fileno()))

    def _flush_and_close(self, file: FileIO) -> None:
        self._flush(file)
        try:
            file.close()
        except OSError as error:  # everything is on the disk, and the descriptor is closed anyway
            logger.warning("%s: closing it failed: %s", self._folder, error)

    def _with_room(self, write: Callable[[], R]) -> R:
        """Call `write` until the disk is no longer full, and return its result."""
        while True:
            try:
                done = write()
                self._full = None
                return done
            except OSError as error:
                if not means_no_space(error):
                    raise
                if self._full is None:
                    logger.warning("no space left in %s: the journal waits in memory", self._folder)
                self._full = error
                self._num_refusals += 1
                if self._closing.wait(RETRY_S):
                    raise

    def _took(self, num_bytes: int) -> None:
        with self._lock:
            self._progress += 1
            self._pending_bytes -= num_bytes
            if self._pending_bytes > self._max_pending_bytes and self._failure is None:
                return
            waiting, self._waiting = self._waiting, []
        for loop, has_room in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_set, has_room)

    def _release_waiters(self, item: bytes | Path | threading.Event | None) -> None:
        """Release the callers that wait for `item` or a later one, because the thread has ended."""
        while item is not None:
            if isinstance(item, threading.Event):
                item.set()
            item = self._queue.get()


def flush_entry(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _open(path: Path) -> FileIO:
    """Open a file for appending, and flush its entry in the folder."""
    file = FileIO(path, "ab")
    try:
        flush_entry(path.parent)
    except OSError:
        file.close()
        raise
    return file
