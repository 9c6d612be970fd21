"""What another host's processes say arrives in the run's folder, whole and once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.actors.hosts.agent import new_output
from titan_rl.actors.hosts.host import Host
from titan_rl.actors.hosts.output import HostOutput
from titan_rl.errors import ActorDiedError


class Agent:
    """Of a host whose files are in a folder here, a few bytes an answer. Silent once its host is gone."""

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
        return new_output(self.folder, have, most_bytes=4)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there" / "logs").mkdir(parents=True)
    return tmp_path / "there"


def output_of(there: Path, here: Path, told: list[str]) -> tuple[Agent, HostOutput]:
    agent = Agent(there)
    here.mkdir(exist_ok=True)
    return agent, HostOutput(Host("far", "10.0.0.2", agent, key="far"), here, told.append)


@pytest.mark.looptime
async def test_it_arrives_as_it_grows_and_the_rest_at_the_end(there: Path, tmp_path: Path) -> None:
    _, output = output_of(there, tmp_path / "here", told := [])
    log, copy = there / "logs" / "a.log", tmp_path / "here" / "logs" / "a.log"
    log.write_bytes(b"0123")
    collecting = asyncio.ensure_future(output.collect())
    await asyncio.sleep(2)
    assert copy.read_bytes() == b"0123"
    log.write_bytes(b"0123456789abcdef")
    collecting.cancel()
    await output.take_rest()
    assert copy.read_bytes() == b"0123456789abcdef"
    assert told == []


@pytest.mark.looptime
async def test_a_disk_that_takes_nothing_is_told_of_once_and_what_is_lost_comes_when_there_is_room(
    there: Path, tmp_path: Path
) -> None:
    _, output = output_of(there, tmp_path / "here", told := [])
    (there / "logs" / "a.log").write_bytes(b"0123456789")
    (tmp_path / "here" / "logs").write_text("in the way of a folder")
    collecting = asyncio.ensure_future(output.collect())
    await asyncio.sleep(5)
    assert [text.partition(": ")[0] for text in told] == ["what host far says is not written here for now"]
    assert not collecting.done()
    await output.take_rest()
    (tmp_path / "here" / "logs").unlink()
    await asyncio.sleep(5)
    assert (tmp_path / "here" / "logs" / "a.log").read_bytes() == b"0123456789"
    collecting.cancel()


@pytest.mark.looptime
async def test_a_host_that_is_gone_ends_the_wait_for_its_rest(there: Path, tmp_path: Path) -> None:
    agent, output = output_of(there, tmp_path / "here", told := [])
    agent.is_gone = True
    async with asyncio.timeout(5):
        await output.take_rest()
    assert told == []


async def test_a_file_that_cannot_be_read_keeps_back_no_other(there: Path) -> None:
    (there / "logs" / "a.log").symlink_to(there / "gone")
    (there / "logs" / "b.log").mkdir()
    (there / "logs" / "c.log").write_bytes(b"0123")
    assert new_output(there, {}) == [("logs/c.log", b"0123")]


@pytest.mark.looptime
async def test_a_host_that_cannot_say_what_it_wrote_is_asked_again(there: Path, tmp_path: Path) -> None:
    agent, output = output_of(there, tmp_path / "here", told := [])
    (there / "logs" / "a.log").write_bytes(b"0123")
    agent.problem = OSError("too many open files")
    collecting = asyncio.ensure_future(output.collect())
    await asyncio.sleep(5)
    await output.take_rest()
    assert [text.partition(": ")[0] for text in told] == ["what host far says is not written here for now"]
    agent.problem = None
    await asyncio.sleep(5)
    collecting.cancel()
    assert (tmp_path / "here" / "logs" / "a.log").read_bytes() == b"0123"


@pytest.mark.looptime
async def test_a_process_that_goes_on_writing_does_not_keep_a_run_from_its_end(there: Path, tmp_path: Path) -> None:
    agent, output = output_of(there, tmp_path / "here", [])
    agent.writes_more = True
    async with asyncio.timeout(60):
        await output.take_rest()
