"""`in_background`: an error of a background task ends the test."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from background import in_background


async def fail() -> None:
    await asyncio.sleep(1)
    raise OSError("broken")


async def wait_beside(background: Coroutine[Any, Any, None]) -> None:
    async with in_background(background):
        await asyncio.Event().wait()


async def fail_beside(background: Coroutine[Any, Any, None]) -> None:
    async with in_background(background) as task:
        await asyncio.wait([task])
        raise AssertionError("the task has ended")


@pytest.mark.looptime
async def test_background_error_interrupts_the_test():
    with pytest.raises(OSError, match="broken"):
        await wait_beside(fail())
    await asyncio.sleep(1)  # the cancellation is over


@pytest.mark.looptime
async def test_background_error_replaces_the_failure_it_caused():
    with pytest.raises(OSError, match="broken"):
        await fail_beside(fail())


async def test_background_task_is_cancelled_when_its_block_ends():
    async with in_background(asyncio.Event().wait()) as task:
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.looptime
async def test_cancellation_of_the_test_stays_a_cancellation():
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait_beside(asyncio.sleep(10)), 1)
