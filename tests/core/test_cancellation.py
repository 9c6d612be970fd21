import asyncio

import pytest

from titan_rl.core.calls.bounded import bounded
from titan_rl.core.calls.cancellation import cancel_requested, stray_cancellation_fails
from titan_rl.core.errors import StrayCancellationError


async def cancels_itself() -> None:
    """Await a cancelled task, like a client whose background task has ended."""
    task = asyncio.ensure_future(asyncio.sleep(10))
    task.cancel()
    await task


async def guarded(awaited: asyncio.Future[None] | None = None) -> None:
    with stray_cancellation_fails("closing the door"):
        await (cancels_itself() if awaited is None else awaited)


async def test_stray_cancellation_is_an_error_and_the_task_continues() -> None:
    with pytest.raises(StrayCancellationError, match="closing the door was cancelled") as caught:
        await guarded()
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    assert isinstance(caught.value, Exception)
    await asyncio.sleep(0)
    assert not cancel_requested()


async def test_cancellation_of_the_task_itself_propagates() -> None:
    task = asyncio.ensure_future(guarded(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancel_requested(task)


async def test_enclosing_timeout_raises_timeout_error() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await guarded(asyncio.get_running_loop().create_future())


@pytest.mark.parametrize("inside", [True, False], ids=["limit outside", "limit inside"])
async def test_unexpired_timeout_does_not_hide_a_stray_cancellation(inside: bool) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await (guarded() if inside else cancels_itself())

    with pytest.raises(StrayCancellationError), stray_cancellation_fails("it"):
        await limited()


async def test_task_group_can_cancel_guarded_children() -> None:
    async def fails() -> None:
        raise ValueError("another child")

    children: list[asyncio.Task[None]] = []

    async def group() -> None:
        async with asyncio.TaskGroup() as group:
            children.append(group.create_task(guarded(asyncio.get_running_loop().create_future())))
            group.create_task(fails())

    with pytest.raises(ExceptionGroup) as caught:
        await group()
    assert [str(error) for error in caught.value.exceptions] == ["another child"]
    assert children[0].cancelled()


async def test_cancel_requested_is_known_for_finished_tasks() -> None:
    stray = asyncio.ensure_future(cancels_itself())
    requested = asyncio.ensure_future(asyncio.sleep(10))
    await asyncio.sleep(0)
    requested.cancel()
    await asyncio.wait({stray, requested})
    assert stray.cancelled()
    assert requested.cancelled()
    assert not cancel_requested(stray)
    assert cancel_requested(requested)


@pytest.mark.looptime
@pytest.mark.parametrize("timeout_s", [None, 1.0])
async def test_second_cancellation_does_not_shorten_the_cleanup(timeout_s: float | None) -> None:
    cleaned_up = False

    async def work() -> None:
        nonlocal cleaned_up
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(4.0)
            cleaned_up = True

    caller = asyncio.ensure_future(bounded(work(), timeout_s, "the work", cleanup_s=5.0))
    for _ in range(2):
        await asyncio.sleep(1.5)
        caller.cancel()
    await asyncio.wait({caller})
    assert caller.cancelled()
    assert cleaned_up
