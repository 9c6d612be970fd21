"""Too few generators are told of, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from titan_rl.run.observability.shortage import Shortage
from titan_rl.run.status import note_waiting, noted
from titan_rl.viewer.run_status import describe_run, read_status


@pytest.mark.looptime
async def test_a_shortage_is_told_of_once_it_lasts_and_so_is_its_end():
    trouble: str | None = None
    told: list[str] = []
    noted: list[str] = []
    watch = asyncio.ensure_future(Shortage(lambda: trouble, told.append, noted.append).watch())
    await asyncio.sleep(100)
    trouble = "none of 2 generators is in service"
    await asyncio.sleep(1)
    trouble = None
    await asyncio.sleep(10.2)
    assert told == noted == []
    trouble = "1 generator serves, and 2 are the least"
    await asyncio.sleep(30)
    trouble = "there is no generator"
    await asyncio.sleep(29.6)
    trouble = None
    await asyncio.sleep(10.2)
    watch.cancel()
    assert told == [
        "the run waits for generators: 1 generator serves, and 2 are the least",
        "the run waits for generators: there is no generator",
        "enough generators serve again, after 60 s",
    ]
    assert noted == ["generators: 1 generator serves, and 2 are the least", "generators: there is no generator", ""]


def test_what_a_run_waits_for_is_in_its_status_until_it_goes_on_or_ends(tmp_path: Path):
    with noted(tmp_path, begins=True):
        note_waiting(tmp_path, "generators: there is no generator")
        assert read_status(tmp_path).waits_for == "generators: there is no generator"
        note_waiting(tmp_path, "")
        assert read_status(tmp_path).waits_for == ""
        note_waiting(tmp_path, "hosts")
        assert describe_run("x", tmp_path)["waits_for"] == "hosts"
    assert read_status(tmp_path).waits_for == ""


@pytest.mark.looptime
async def test_what_a_trainer_waits_for_is_noted_beside_what_generators_lack():
    trouble: str | None = None
    lacks = ""
    told: list[str] = []
    noted: list[str] = []
    watch = asyncio.ensure_future(Shortage(lambda: trouble, told.append, noted.append, lambda: lacks).watch())
    lacks = "it waits for hosts"
    await asyncio.sleep(1)
    trouble = "there is no generator"
    await asyncio.sleep(10)
    trouble = None
    await asyncio.sleep(1)
    lacks = ""
    await asyncio.sleep(1)
    watch.cancel()
    alone = "trainer: it waits for hosts"
    assert noted == [alone, f"generators: there is no generator; {alone}", alone, ""]
    assert not any("hosts" in line for line in told), "the trainer tells that itself"
