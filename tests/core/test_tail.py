"""Following files that others append to, truncate and replace: each complete line once, and again from the beginning
after a replacement."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.core.files import Tail, last_lines


class Follower:
    """Reader that follows a file, with the lines that it has seen."""

    def __init__(self, path: Path, most: int) -> None:
        self.tail = Tail(path, most)
        self.lines: list[bytes] = []
        self.num_skipped = 0

    def catch_up(self, at_most: int) -> None:
        while True:
            chunk = self.tail.read(at_most)
            if chunk.begins:
                self.lines.clear()
                self.num_skipped = 0
            self.num_skipped += chunk.num_skipped
            assert all(chunk.start <= offset < chunk.read for offset, _ in chunk.lines)
            self.lines += [line for _, line in chunk.lines]
            if chunk.is_last:
                return


WRITE = st.tuples(st.just("write"), st.binary(max_size=40))
CUT = st.tuples(st.just("replace"), st.integers(0, 6))
TRUNCATE = st.tuples(st.just("truncate"), st.integers(0, 80))
LOOK = st.tuples(st.just("look"), st.integers(1, 30))


@given(st.lists(st.one_of(WRITE, CUT, TRUNCATE, LOOK, LOOK), max_size=30), st.sampled_from([5, 20, 1000]))
def test_tail_yields_every_complete_line(tmp_path_factory, actions: list[tuple[str, object]], most: int) -> None:
    path = tmp_path_factory.mktemp("tail") / "x.jsonl"
    follower = Follower(path, most)
    counter = 0
    for what, amount in actions:
        old = path.read_bytes() if path.exists() else b""
        if what == "write":
            # The counter makes all lines different, like the records of a run.
            counter += 1
            with path.open("ab") as file:
                file.write(str(counter).encode() + bytes(amount))  # pyright: ignore[reportArgumentType]
        elif what == "replace":
            counter += 1
            fresh = path.with_suffix(".tmp")
            kept = old.splitlines(keepends=True)[: int(amount)]  # pyright: ignore[reportArgumentType]
            fresh.write_bytes(b"".join(kept))
            fresh.replace(path)
        elif what == "truncate":
            path.write_bytes(old[: int(amount)])  # pyright: ignore[reportArgumentType]
            follower.catch_up(8)
        else:
            follower.catch_up(int(amount))  # pyright: ignore[reportArgumentType]
            whole = path.read_bytes() if path.exists() else b""
            lines = whole.split(b"\n")[:-1]
            assert follower.lines == [line for line in lines if len(line) <= most]
            assert follower.num_skipped == sum(len(line) > most for line in lines)


def test_line_is_read_once_complete(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = Tail(path)
    assert tail.read().is_last
    path.write_bytes(b'{"a": 1}\n{"a"')
    assert [*tail.read().lines] == [(0, b'{"a": 1}')]
    assert tail.read().is_last
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert [*tail.read().lines] == [(9, b'{"a": 2}')]
    assert not tail.has_changed()


def test_overlong_unfinished_line_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"x" * 100)
    tail = Tail(path, most=10)
    assert sum(len(tail.read().data) for _ in range(10)) == 0
    assert not tail.has_changed()
    with path.open("ab") as file:
        file.write(b"x\n1\n")
    chunk = tail.read()
    assert ([*chunk.lines], chunk.num_skipped) == ([(102, b"1")], 1)


def test_removed_file_reads_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"1\n")
    tail = Tail(path)
    assert tail.read().data == b"1\n"
    path.unlink()
    assert tail.has_changed()
    assert tail.read().begins
    assert not tail.has_changed()


def test_rewritten_file_of_the_same_length_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"1\n")
    tail = Tail(path)
    tail.read()
    path.write_bytes(b"2\n")
    assert [*tail.read().lines] == [(0, b"2")]


@given(st.lists(st.sampled_from([b"", b"a", b"bcd", b"\n", b"\n\n"])), st.integers(1, 9))
def test_last_lines_reads_backwards(tmp_path_factory, parts: list[bytes], at_once: int) -> None:
    path = tmp_path_factory.mktemp("tail") / "x.jsonl"
    assert [*last_lines(path)] == []
    path.write_bytes(b"".join(parts))
    assert [*last_lines(path, at_once=at_once)] == b"".join(parts).split(b"\n")[-2::-1]


def test_last_lines_reads_at_most_within_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"first\n" * 1000 + b"last\nunfinished")
    assert [*last_lines(path, within=21)] == [b"last"]
    path.write_bytes(b"x" * 100 + b"\n")
    assert [*last_lines(path, within=40)] == [], "a partial line does not count"
    assert [*last_lines(path, within=101)] == [b"x" * 100]
