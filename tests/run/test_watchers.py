"""Warnings of stalls and of missing generators, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from background import in_background

from titan_rl.core.console import Console, ConsoleLines
from titan_rl.core.run_files import read_status
from titan_rl.run.observability import watchers
from titan_rl.run.observability.watchers import warn_of_shortage, warn_of_stalls
from titan_rl.run.status import note_waiting, status_kept
from titan_rl.viewer.summary import describe_run


@dataclass
class FakeRun:
    happened: int = 0

    def progress(self) -> object:
        return self.happened

    def waits_for(self) -> str:
        return "no generator serves"


@dataclass
class FakeResources:
    generators: str | None = None
    trainer: str = ""

    def trouble(self) -> str | None:
        return self.generators

    def trainer_lacks(self) -> str:
        return self.trainer


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that the status of the run has named as waited for."""
    noted: list[str] = []
    monkeypatch.setattr(watchers, "note_waiting", lambda folder, waits_for: noted.append(waits_for))
    return noted


@pytest.mark.looptime
async def test_stall_warnings_become_rarer_and_the_end_is_reported_once():
    messages: list[tuple[int, str]] = []
    loop = asyncio.get_running_loop()
    begin, run = loop.time(), FakeRun()

    class Timed(Console):
        def warning(self, text: str) -> None:
            messages.append((round(loop.time() - begin), text))

    async with in_background(warn_of_stalls(run, Timed())):
        for _ in range(10):  # occasional progress is not a stall
            await asyncio.sleep(20)
            run.happened += 1
        assert messages == []
        await asyncio.sleep(131)
        run.happened += 1
        await asyncio.sleep(200)
    texts = [text for _, text in messages]
    assert texts[:3] == [
        "nothing has happened for 30 s: no generator serves",
        "nothing has happened for 60 s: no generator serves",
        "nothing has happened for 120 s: no generator serves",
    ]
    assert texts[3].startswith("the run continues, after 13")
    assert [when for when, _ in messages[:3]] == [pytest.approx(200 + seconds, abs=6) for seconds in (30, 60, 120)]
    assert len([text for text in texts if "continues" in text]) == 1


@pytest.mark.looptime
async def test_lasting_shortage_and_its_end_are_reported(tmp_path: Path, waits: list[str]):
    resources = FakeResources()
    messages = ConsoleLines()
    async with in_background(warn_of_shortage(resources, messages, tmp_path)):
        await asyncio.sleep(100)
        resources.generators = "none of 2 generators is in service"
        await asyncio.sleep(1)
        resources.generators = None
        await asyncio.sleep(10.2)
        assert messages == waits == []
        resources.generators = "1 generator serves, but at least 2 must"
        await asyncio.sleep(30)
        resources.generators = "there are no generators"
        await asyncio.sleep(29.6)
        resources.generators = None
        await asyncio.sleep(10.2)
    assert messages == [
        "the run waits for generators: 1 generator serves, but at least 2 must",
        "the run waits for generators: there are no generators",
        "enough generators serve again, after 60 s",
    ]
    assert waits == ["generators: 1 generator serves, but at least 2 must", "generators: there are no generators", ""]


def test_status_shows_the_wait_until_the_run_continues_or_ends(tmp_path: Path):
    with status_kept(tmp_path, begins=True):
        note_waiting(tmp_path, "generators: there are no generators")
        assert read_status(tmp_path).waits_for == "generators: there are no generators"
        note_waiting(tmp_path, "")
        assert read_status(tmp_path).waits_for == ""
        note_waiting(tmp_path, "hosts")
        assert describe_run(tmp_path)["waits_for"] == "hosts"
    assert read_status(tmp_path).waits_for == ""


@pytest.mark.looptime
async def test_status_shows_waits_of_the_trainer_and_of_generators(tmp_path: Path, waits: list[str]):
    resources = FakeResources()
    messages = ConsoleLines()
    async with in_background(warn_of_shortage(resources, messages, tmp_path)):
        resources.trainer = "it waits for hosts"
        await asyncio.sleep(1)
        resources.generators = "there are no generators"
        await asyncio.sleep(10)
        resources.generators = None
        await asyncio.sleep(1)
        resources.trainer = ""
        await asyncio.sleep(1)
    alone = "trainer: it waits for hosts"
    assert waits == [alone, f"generators: there are no generators; {alone}", alone, ""]
    assert not any("hosts" in line for line in messages), "the trainer reports that itself"
