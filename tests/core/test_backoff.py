"""Pauses between retries grow, and end with the time limit."""

from __future__ import annotations

import asyncio

import pytest

from titan_rl.core.calls.retries import Backoff

pytestmark = pytest.mark.looptime


async def test_backoff_doubles_up_to_the_maximum() -> None:
    backoff, clock = Backoff(0.5, 3.0), asyncio.get_running_loop().time
    pauses = list[float]()
    for _ in range(5):
        began = clock()
        await backoff.pause()
        pauses.append(clock() - began)
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 3.0, 3.0])
    assert backoff.left_s is None
    assert not backoff.is_over


async def test_backoff_ends_before_exceeding_its_limit() -> None:
    backoff = Backoff(1.0, 60.0, limit_s=10.0)
    count = 0
    while not backoff.is_over:
        await backoff.pause()
        count += 1
    assert count == 3  # 1 + 2 + 4 seconds; 8 more would be too long
    assert backoff.left_s == pytest.approx(3.0)
    await asyncio.sleep(20)
    assert backoff.left_s == 0.0
