"""Output of processes on other hosts, which is copied to the run's folder exactly once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.hosts.agent import new_pieces
from titan_rl.cluster.hosts.attached_hosts import REST_S, HostOutput
from titan_rl.cluster.hosts.host import Host
from titan_rl.core.console import ConsoleLines
from titan_rl.core.errors import ActorDiedError
from titan_rl.core.tracing.recorder import TraceFile


class Agent:
    """Agent of a host whose files are in a local folder. Answers a few bytes at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_gone = self.writes_more = False
        self.problem: OSError | None = None
        self.new_output = self

    async def call_one(self, have: Any) -> Any:
        await asyncio.sleep(0.01)
        if self.is_gone:
            raise ActorDiedError("it is gone")
        if self.problem is not None:
            raise self.problem
        if self.writes_more:
            with (self.folder / "logs" / "a.log").open("ab") as log:
                log.write(b"more")
        return new_pieces(self.folder, have, most_bytes=4)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there" / "logs").mkdir(parents=True)
    return tmp_path / "there"


def output_of(there: Path, here: Path, console: ConsoleLines) -> tuple[Agent, HostOutput]:
    agent = Agent(there)
    here.mkdir(exist_ok=True)
    return agent, HostOutput(Host("far", "10.0.0.2", agent, key="far"), here, console)


@pytest.mark.looptime
async def test_output_is_copied_as_it_grows_and_completed_at_the_end(there: Path, tmp_path: Path) -> None:
    _, output = output_of(there, tmp_path / "here", console := ConsoleLines())
    log, copy = there / "logs" / "a.log", tmp_path / "here" / "logs" / "a.log"
    log.write_bytes(b"0123")
    collecting = asyncio.ensure_future(output.collect())
    await asyncio.sleep(2)
    assert copy.read_bytes() == b"0123"
    log.write_bytes(b"0123456789abcdef")
    collecting.cancel()
    await output.take_rest()
    assert copy.read_bytes() == b"0123456789abcdef"
    assert console == []


@pytest.mark.looptime
async def test_unwritable_folder_warns_once_and_output_catches_up(there: Path, tmp_path: Path) -> None:
    _, output = output_of(there, tmp_path / "here", console := ConsoleLines())
    (there / "logs" / "a.log").write_bytes(b"0123456789")
    (tmp_path / "here" / "logs").write_text("in the way of a folder")
    collecting = asyncio.ensure_future(output.collect())
    await asyncio.sleep(5)
    assert [text.partition(": ")[0] for text in console] == ["the output of host far cannot be written at the moment"]
    assert not collecting.done()
    await output.take_rest()
    (tmp_path / "here" / "logs").unlink()
    await asyncio.sleep(5)
    assert (tmp_path / "here" / "logs" / "a.log").read_bytes() == b"0123456789"
    collecting.cancel()


@pytest.mark.looptime
async def test_take_rest_ends_when_the_host_is_gone(there: Path, tmp_path: Path) -> None:
    agent, output = output_of(there, tmp_path / "here", console := ConsoleLines())
    agent.is_gone = True
    async with asyncio.timeout(5):
        await output.take_rest()
    assert console == []


async def test_unreadable_files_do_not_block_others(there: Path) -> None:
    (there / "logs" / "a.log").symlink_to(there / "gone")
    (there / "logs" / "b.log").mkdir()
    (there / "logs" / "c.log").write_bytes(b"0123")
    assert [piece.name for piece in new_pieces(there, {})] == ["logs/c.log"]


@pytest.mark.looptime
async def test_failed_output_request_is_retried(there: Path, tmp_path: Path) -> None:
    agent, output = output_of(there, tmp_path / "here", console := ConsoleLines())
    (there / "logs" / "a.log").write_bytes(b"0123")
    agent.problem = OSError("too many open files")
    collecting = asyncio.ensure_future(output.collect())
    await asyncio.sleep(5)
    await output.take_rest()
    assert [text.partition(": ")[0] for text in console] == ["the output of host far cannot be written at the moment"]
    agent.problem = None
    await asyncio.sleep(5)
    collecting.cancel()
    assert (tmp_path / "here" / "logs" / "a.log").read_bytes() == b"0123"


@pytest.mark.looptime
async def test_take_rest_ends_while_a_process_keeps_writing(there: Path, tmp_path: Path) -> None:
    agent, output = output_of(there, tmp_path / "here", ConsoleLines())
    agent.writes_more = True
    async with asyncio.timeout(2 * REST_S):
        await output.take_rest()


def test_new_pieces_continue_after_the_bytes_already_sent(there: Path) -> None:
    (there / "trace").mkdir()
    for name, text in {"logs/a.log": "0123456789", "trace/a.jsonl": "{}", "config.toml": "not this"}.items():
        (there / name).write_text(text)
    first = new_pieces(there, {}, most_bytes=4)
    assert [(piece.name, piece.begin, piece.data) for piece in first] == [("logs/a.log", 0, b"0123")]
    received = {"logs/a.log": (first[0].file, 4)}
    rest = new_pieces(there, received, most_bytes=7)
    assert [(piece.name, piece.begin, piece.data) for piece in rest] == [
        ("logs/a.log", 4, b"456789"),
        ("trace/a.jsonl", 0, b"{"),
    ]
    assert new_pieces(there, {piece.name: (piece.file, piece.begin + len(piece.data)) for piece in rest}, 0) == []


@pytest.mark.looptime
async def test_trace_replaced_by_a_shorter_file_is_copied_exactly(there: Path, tmp_path: Path) -> None:
    """The trace follows that of an earlier process of the same name on another host."""
    _, output = output_of(there, tmp_path / "here", console := ConsoleLines())
    copy = tmp_path / "here" / "trace" / "generator-0.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(b"elsewhere\n")
    (there / "trace").mkdir()
    (trace := TraceFile(there / "trace" / "generator-0.jsonl", most_bytes=100)).append([])
    collecting = asyncio.ensure_future(output.collect())
    for number in range(20):
        trace.append([b'{"number": %d}\n' % number])
        (there / "trace" / "generator-0.tmp").write_bytes(b"on its way")
        await asyncio.sleep(1)
    collecting.cancel()
    await output.take_rest()
    assert copy.read_bytes() == b"elsewhere\n" + (there / "trace" / "generator-0.jsonl").read_bytes()
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
    assert console == []
