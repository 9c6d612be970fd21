"""The log: what is whole is read, what is torn is dropped, and a broken disk is told of."""

import os

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.durability.log import LogWriter, cut_torn_record, read_log
from titan_rl.errors import CheckpointError


def write(path, records) -> None:
    writer = LogWriter(path)
    for record in records:
        writer.append(record)
    writer.close()


@settings(max_examples=examples(20), deadline=None)
@given(records=st.lists(st.binary(max_size=12), min_size=1, max_size=5))
def test_a_log_cut_at_any_byte_gives_its_whole_records_and_can_be_appended_to(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("log")
    write(folder / "whole", records)
    data = (folder / "whole").read_bytes()
    ends = [sum(8 + len(r) for r in records[: n + 1]) for n in range(len(records))]
    for size in range(len(data) + 1):
        path = folder / "cut"
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends)
        assert list(read_log(path)) == records[:whole]
        assert cut_torn_record(path) == size - ([0, *ends][whole])
        write(path, [b"next"])
        assert list(read_log(path)) == [*records[:whole], b"next"]


def test_a_changed_byte_ends_the_log(tmp_path):
    path = tmp_path / "log"
    write(path, [b"first", b"second", b"third"])
    data = bytearray(path.read_bytes())
    data[8 + 5 + 8] ^= 1
    path.write_bytes(data)
    assert list(read_log(path)) == [b"first"]


def test_a_missing_log_is_empty(tmp_path):
    assert list(read_log(tmp_path / "none")) == []
    assert cut_torn_record(tmp_path / "none") == 0


def test_a_write_that_fails_is_told_of_by_every_later_call(tmp_path):
    writer = LogWriter(tmp_path / "no folder" / "log")
    with pytest.raises(CheckpointError, match="could not be written"):
        writer.drain()
    with pytest.raises(CheckpointError, match="could not be written"):
        writer.append(b"x")
    with pytest.raises(CheckpointError, match="could not be written"):
        writer.close()


def test_records_that_wait_for_the_disk_are_bounded(tmp_path):
    os.mkfifo(tmp_path / "log")  # opening it blocks until somebody reads
    writer = LogWriter(tmp_path / "log", max_pending_bytes=10)
    writer.append(b"12345")
    with pytest.raises(CheckpointError, match="wait for the disk"):
        writer.append(b"123456")
    with (tmp_path / "log").open("rb"):
        pass
