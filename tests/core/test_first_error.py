"""The error that ended a program is raised even if its cleanup fails, too."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest

from titan_rl.core.calls.cancellation import FirstError
from titan_rl.core.errors import NoSpaceError, TrainingError


@contextmanager
def failing_at_its_end(error: Exception):
    try:
        yield
    finally:
        raise error


def test_first_error_is_raised_with_cleanup_errors_as_notes() -> None:
    first = FirstError()
    with (
        pytest.raises(TrainingError, match="the loss is nan") as caught,
        first.wins(),
        failing_at_its_end(OSError(28, "No space left on device")),
        failing_at_its_end(NoSpaceError("no space left for the journal")),
        first.source(),
    ):
        raise TrainingError("the loss is nan")
    assert caught.value.__notes__ == ["cleaning up failed, too: OSError: [Errno 28] No space left on device"]
    assert caught.value.__cause__ is None


def test_cleanup_error_is_raised_when_nothing_failed_before() -> None:
    first = FirstError()
    with (
        pytest.raises(NoSpaceError),
        first.wins(),
        failing_at_its_end(NoSpaceError("no space left for the journal")),
        first.source(),
    ):
        pass


def test_error_caused_by_the_first_error_is_kept() -> None:
    first = FirstError()
    with pytest.raises(RuntimeError, match="a better message"), first.wins():  # noqa: PT012
        try:
            with first.source():
                raise TrainingError("the loss is nan")
        except TrainingError as error:
            raise RuntimeError("a better message") from error


async def test_exception_group_with_the_first_error_is_kept() -> None:
    first = FirstError()
    with pytest.raises(ExceptionGroup) as caught, first.wins():  # noqa: PT012
        async with asyncio.TaskGroup():
            with first.source():
                raise TrainingError("the loss is nan")
    assert caught.group_contains(TrainingError)


async def test_cancellation_does_not_hide_a_cleanup_error() -> None:
    first = FirstError()

    async def program() -> None:
        with first.wins(), failing_at_its_end(NoSpaceError("no space left")), first.source():
            await asyncio.Event().wait()

    running = asyncio.create_task(program())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(NoSpaceError):
        await running
