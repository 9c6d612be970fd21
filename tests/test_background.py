"""`in_background`: the error of a background task ends the test."""

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
        raise AssertionError("the task is no more")


@pytest.mark.looptime
async def test_an_error_interrupts_what_the_test_waits_for():
    with pytest.raises(OSError, match="broken"):
        await wait_beside(fail())
    await asyncio.sleep(1)  # the cancellation is over


@pytest.mark.looptime
async def test_an_error_is_raised_also_where_the_test_failed_because_of_it():
    with pytest.raises(OSError, match="broken"):
        await fail_beside(fail())


async def test_a_task_ends_with_its_block():
    async with in_background(asyncio.Event().wait()) as task:
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.looptime
async def test_the_cancellation_of_a_test_stays_one():
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait_beside(asyncio.sleep(10)), 1)
