"""Silence is told of, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from titan_rl.run.observability.standstill import Standstill


@pytest.mark.looptime
async def test_a_standstill_is_told_of_ever_more_seldom_and_its_end_once():
    told: list[tuple[int, str]] = []
    loop = asyncio.get_running_loop()
    begin, happened = loop.time(), 0

    def tell(text: str) -> None:
        told.append((round(loop.time() - begin), text))

    watch = asyncio.ensure_future(Standstill(lambda: happened, lambda: "no generator serves", tell).watch())
    for _ in range(10):  # something now and then is no standstill
        await asyncio.sleep(20)
        happened += 1
    assert told == []
    await asyncio.sleep(131)
    happened += 1
    await asyncio.sleep(200)
    watch.cancel()
    texts = [text for _, text in told]
    assert texts[:3] == [
        "nothing has happened for 30 s: no generator serves",
        "nothing has happened for 60 s: no generator serves",
        "nothing has happened for 120 s: no generator serves",
    ]
    assert texts[3].startswith("it goes on, after 13")
    assert [when for when, _ in told[:3]] == [pytest.approx(200 + seconds, abs=6) for seconds in (30, 60, 120)]
    assert len([text for text in texts if "goes on" in text]) == 1
