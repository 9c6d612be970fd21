"""Log file of the journal: whole records survive damage, nothing is cut away, and a slow disk makes callers wait."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from io import FileIO

import pytest
from background import HANG_S
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.core.errors import CheckpointError, NoSpaceError
from titan_rl.run.journal import log_file
from titan_rl.run.journal.log_file import Damage, LogWriter, frame, read_log

RECORDS = st.lists(st.binary(max_size=12), min_size=1, max_size=5)


def write(path, records) -> None:
    writer = LogWriter(path)
    for record in records:
        writer.append(record)
    writer.close()


def read(path) -> tuple[list[bytes], list[Damage]]:
    """Return the records and the damaged ranges."""
    damages: list[Damage] = []
    return list(read_log(path, damages)), damages


@settings(max_examples=examples(20), deadline=None)
@given(records=RECORDS)
def test_truncated_log_yields_whole_records_and_can_be_appended_to(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("log") / "cut"
    frames = [frame(record) for record in records]
    data = b"".join(frames)
    ends = [sum(map(len, frames[: n + 1])) for n in range(len(records))]
    for size in range(len(data) + 1):
        whole = sum(end <= size for end in ends)
        end = [0, *ends][whole]
        torn = [(end, size - end)] if size > end else []
        path.write_bytes(data[:size])
        assert read(path) == (records[:whole], torn)
        path.write_bytes(data[:size] + frame(b"next"))
        assert read(path) == ([*records[:whole], b"next"], torn)


@settings(max_examples=examples(20), deadline=None)
@given(records=RECORDS, changed=st.data())
def test_changed_byte_loses_only_its_record(tmp_path_factory, records, changed):
    path = tmp_path_factory.mktemp("log") / "log"
    frames = [bytearray(frame(record)) for record in records]
    hit = changed.draw(st.integers(0, len(records) - 1))
    position = changed.draw(st.integers(0, len(frames[hit]) - 1))
    frames[hit][position] ^= changed.draw(st.integers(1, 255))
    path.write_bytes(b"".join(frames))
    found, damages = read(path)
    assert found == records[:hit] + records[hit + 1 :]
    assert damages == [(sum(map(len, frames[:hit])), len(frames[hit]))]
    write(path, [b"next"])
    assert read(path)[0] == [*found, b"next"]


@pytest.mark.parametrize("count", [1, 8, 12, 16, 4096])
def test_trailing_zeros_are_not_records(tmp_path, count):
    path = tmp_path / "log"
    write(path, [b"first"])
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(count))
    assert read(path) == ([b"first"], [(size, count)])
    write(path, [b"", b"second"])
    assert read(path)[0] == [b"first", b"", b"second"]


def test_frame_inside_a_record_is_not_a_record(tmp_path):
    path = tmp_path / "log"
    write(path, [b"a" + frame(b"inner") + b"b", b"outer"])
    assert read(path) == ([b"a" + frame(b"inner") + b"b", b"outer"], [])


def test_missing_log_is_empty(tmp_path):
    assert read(tmp_path / "none") == ([], [])


def test_failed_write_raises_in_every_later_call(tmp_path):
    writer = LogWriter(tmp_path / "no folder" / "log")
    with pytest.raises(CheckpointError, match="could not be written"):
        writer.drain()
    with pytest.raises(CheckpointError, match="could not be written"):
        writer.append(b"x")
    with pytest.raises(CheckpointError, match="could not be written"):
        writer.close()


async def test_room_waits_for_a_slow_disk(tmp_path):
    os.mkfifo(tmp_path / "log")  # opening it blocks until somebody reads
    writer = LogWriter(tmp_path / "log", max_pending_bytes=10)
    await asyncio.wait_for(writer.room(), HANG_S)
    writer.append(bytes(100))
    waiting = [asyncio.ensure_future(writer.room()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    writer.append(bytes(100))  # callers that cannot wait are not refused
    with (tmp_path / "log").open("rb") as reader:
        await asyncio.wait_for(asyncio.gather(*waiting), HANG_S)
        assert len(reader.read(2 * len(frame(bytes(100))))) == 2 * len(frame(bytes(100)))


async def test_stalled_disk_raises_after_stall_s(tmp_path):
    os.mkfifo(tmp_path / "log")
    writer = LogWriter(tmp_path / "log", max_pending_bytes=10, stall_s=0.01)
    writer.append(bytes(100))
    with pytest.raises(CheckpointError, match=r"nothing could be written .* for 0\.01 s; 113 bytes are waiting"):
        await writer.room()
    with pytest.raises(CheckpointError, match="nothing could be written"):
        writer.drain()
    with (tmp_path / "log").open("rb"):
        pass


def test_full_disk_delays_records_without_losing_any(tmp_path, monkeypatch):
    full = threading.Event()
    refused = threading.Event()

    class Disk(FileIO):
        def write(self, data) -> int:
            if full.is_set():
                refused.set()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data[:7])  # a partial write, as on a nearly full disk

    monkeypatch.setattr(log_file, "FileIO", Disk)
    monkeypatch.setattr(log_file, "RETRY_S", 0.01)
    path = tmp_path / "1.journal"
    writer = LogWriter(path)
    writer.append(b"before")
    writer.drain()
    full.set()
    writer.append(b"while it is full")
    assert refused.wait(20)
    with pytest.raises(NoSpaceError, match=f"no space left in {tmp_path}"):
        writer.drain()
    writer.append(b"and more")
    full.clear()
    writer.switch(tmp_path / "2.journal")
    writer.append(b"after")
    writer.close()
    assert list(read_log(path)) == [b"before", b"while it is full", b"and more"]
    assert list(read_log(tmp_path / "2.journal")) == [b"after"]


def test_close_does_not_wait_for_a_full_disk(tmp_path, monkeypatch):
    class Full(FileIO):
        def write(self, data) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(log_file, "FileIO", Full)
    monkeypatch.setattr(log_file, "RETRY_S", 0.01)
    writer = LogWriter(tmp_path / "1.journal")
    writer.append(b"lost")
    with pytest.raises(NoSpaceError):
        writer.close()


@pytest.mark.parametrize("ending", ["drain", "switch", "close"])
def test_full_disk_reported_by_fsync_is_retried(tmp_path, monkeypatch, ending):
    full, refused, flush = threading.Event(), threading.Event(), os.fsync

    def fsync(descriptor: int) -> None:
        if full.is_set():
            refused.set()
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(log_file, "RETRY_S", 0.01)
    writer = LogWriter(tmp_path / "1.journal")
    writer.drain()
    full.set()
    writer.append(b"before")
    if ending == "switch":
        writer.switch(tmp_path / "2.journal")
        assert refused.wait(20)
    with pytest.raises(NoSpaceError, match=f"no space left in {tmp_path}"):
        writer.close() if ending == "close" else writer.drain()
    full.clear()
    if ending != "close":
        writer.append(b"after")
        writer.close()
    written = [*read_log(tmp_path / "1.journal"), *read_log(tmp_path / "2.journal")]
    assert written == [b"before", b"after"][: 1 if ending == "close" else 2]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_close_errors_after_a_flush_are_ignored(tmp_path, monkeypatch, code):
    class Disk(FileIO):
        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open:
                raise OSError(code, os.strerror(code))

    monkeypatch.setattr(log_file, "FileIO", Disk)
    writer = LogWriter(tmp_path / "1.journal")
    writer.append(b"one")
    writer.switch(tmp_path / "2.journal")
    writer.append(b"two")
    writer.close()
    assert [*read_log(tmp_path / "1.journal"), *read_log(tmp_path / "2.journal")] == [b"one", b"two"]


def test_failed_fsync_raises_in_every_later_call(tmp_path, monkeypatch):
    writer = LogWriter(tmp_path / "log")
    writer.drain()

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    for call in (writer.drain, writer.drain, writer.close):
        with pytest.raises(CheckpointError, match=r"could not be written: .*Input/output error"):
            call()


def test_read_log_rejects_paths_that_are_not_regular_files(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("folder", "pipe", "loop"):
        with pytest.raises(OSError, match=r"not a regular file|symbolic links"):
            read(tmp_path / name)


ABANDONED = """
import sys
from pathlib import Path
from titan_rl.run.journal import log_file
from titan_rl.run.journal.log_file import LogWriter

async def program():
    writer = LogWriter(Path(sys.argv[1]))
    try:
        writer.append(b"record")
        writer.drain()
        await Forever()
    finally:
        writer.append(b"late")
        writer.close()

class Forever:
    def __await__(self):
        yield

running = program()
running.send(None)
sys.modules["keeps"] = running  # closed when the interpreter ends, which stops the writer's thread first
"""


def test_close_at_interpreter_exit_does_not_wait_for_the_thread(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", ABANDONED, str(tmp_path / "log")], timeout=200, capture_output=True, text=True
    )
    assert ended.returncode == 0
    assert "CheckpointError: the journal's thread has ended" in ended.stderr
    assert read(tmp_path / "log")[0] == [b"record"]


def test_unexpected_error_in_the_writer_thread_is_raised(tmp_path, monkeypatch):
    class Broken(FileIO):
        def write(self, data):
            raise MemoryError("no more")

    monkeypatch.setattr(log_file, "FileIO", Broken)
    writer = LogWriter(tmp_path / "log", stall_s=30.0)
    writer.append(b"record")
    with pytest.raises(CheckpointError, match="no more"):
        writer.drain()
    with pytest.raises(CheckpointError, match="no more"):
        writer.close()
