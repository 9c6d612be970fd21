"""Event queue of a stream, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from titan_rl.serving.http.exchange import KEEP_ALIVE, Events


@pytest.mark.looptime
async def test_batches_events_and_sends_keep_alives_when_idle() -> None:
    loop = asyncio.get_running_loop()
    began, events = loop.time(), Events(keep_alive_s=10.0)
    received: list[tuple[int, bytes]] = []

    async def take() -> None:
        while True:
            sent = await events.next()
            received.append((round(loop.time() - began), sent))

    taking = asyncio.create_task(take())
    events.add(b"a")
    events.add(b"b")
    await asyncio.sleep(4)
    events.add(b"c")
    await asyncio.sleep(21)
    events.wake()
    await asyncio.sleep(0.1)
    events.close()
    await asyncio.sleep(60)
    taking.cancel()
    assert received == [(0, b"ab"), (4, b"c"), (14, KEEP_ALIVE), (24, KEEP_ALIVE), (25, b"")]
