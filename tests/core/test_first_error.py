"""What ended a program is told, whatever its cleanup raises after that."""

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


def test_what_ended_it_is_raised_and_notes_what_its_cleanup_raised() -> None:
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


def test_what_cleanup_raises_is_raised_where_nothing_ended_it_before() -> None:
    first = FirstError()
    with (
        pytest.raises(NoSpaceError),
        first.wins(),
        failing_at_its_end(NoSpaceError("no space left for the journal")),
        first.source(),
    ):
        pass


def test_an_error_that_names_what_ended_it_as_its_cause_stands() -> None:
    first = FirstError()
    with pytest.raises(RuntimeError, match="told better"), first.wins():  # noqa: PT012
        try:
            with first.source():
                raise TrainingError("the loss is nan")
        except TrainingError as error:
            raise RuntimeError("told better") from error


async def test_a_group_with_what_ended_it_stands() -> None:
    first = FirstError()
    with pytest.raises(ExceptionGroup) as caught, first.wins():  # noqa: PT012
        async with asyncio.TaskGroup():
            with first.source():
                raise TrainingError("the loss is nan")
    assert caught.group_contains(TrainingError)


async def test_a_cancellation_hides_nothing() -> None:
    first = FirstError()

    async def program() -> None:
        with first.wins(), failing_at_its_end(NoSpaceError("no space left")), first.source():
            await asyncio.Event().wait()

    running = asyncio.create_task(program())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(NoSpaceError):
        await running
