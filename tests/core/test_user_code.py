"""Descriptions and locations of exceptions in user code."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_rl.core.calls.user_code import Failure, describe, reason, source_location, summary, where
from titan_rl.core.errors import StateDictError


def caught(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def look_up() -> object:
    return {}["answer"]


def parse() -> object:
    return json.loads("{")


def line_of(function: Callable[[], object]) -> int:
    return function.__code__.co_firstlineno + 1


def test_describe_gives_type_text_file_and_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parent)
    assert describe(caught(look_up)) == f"KeyError: 'answer' (test_user_code.py:{line_of(look_up)} in look_up)"


def test_location_is_the_users_line_and_not_the_librarys():
    assert (where(caught(parse)) or "").endswith(f"test_user_code.py:{line_of(parse)} in parse")


def test_location_of_a_wrapped_error_is_that_of_its_cause():
    def wrapped() -> None:
        try:
            look_up()
        except KeyError as error:
            raise wrap(error) from error

    def wrap(error: KeyError) -> ValueError:
        return ValueError(f"a reward failed: {error}")

    error = caught(wrapped)
    error.__traceback__ = None  # raised outside user code
    assert (where(error) or "").endswith("in look_up")


async def test_location_of_a_timeout_is_the_hanging_line():
    async def hang() -> None:
        await asyncio.Event().wait()

    async def limited() -> None:
        async with asyncio.timeout(0):
            await hang()

    with pytest.raises(TimeoutError) as late:
        await limited()
    late.value.__traceback__ = None
    assert (where(late.value) or "").endswith("in hang")


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_exception_with_a_failing_str_is_described(kind: type[BaseException]):
    class Broken(Exception):
        def __str__(self) -> str:
            raise kind("no text")

    def fail() -> None:
        raise Broken

    assert describe(caught(fail)).startswith(f"Broken: (its text cannot be read: {kind.__name__}) (")


def test_exception_without_a_traceback_has_no_location():
    assert describe(ValueError("never raised")) == "ValueError: never raised"


def test_failures_at_one_line_have_the_same_kind():
    def fail(number: int) -> Callable[[], object]:
        def act() -> object:
            raise ValueError(f"row {number}: bad")

        return act

    first, second = (Failure.of(caught(fail(number))) for number in (1, 2))
    assert first.kind == second.kind
    assert first.error != second.error
    assert Failure.of(caught(look_up)).kind != first.kind
    assert "Traceback" in first.traceback
    assert "ValueError: row 1: bad" in first.traceback
    assert pickle.loads(pickle.dumps(first)) == first


class Judge:
    def __call__(self) -> float:
        return 1.0

    def method(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (look_up, "look_up"),
        (functools.partial(look_up), "look_up"),
        (functools.cache(look_up), "look_up"),
        (Judge(), "__call__"),
        (Judge().method, "method"),
    ],
    ids=["function", "partial", "wrapped", "object", "method"],
)
def test_source_location_names_the_file_and_function(function: Callable[..., object], name: str) -> None:
    place = source_location(function)
    assert place is not None
    file, _, rest = place.partition(":")
    assert (file, rest.partition(" in ")[2]) == ("tests/core/test_user_code.py", name)


def test_builtin_function_has_no_source_location():
    assert source_location(len) is None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "TimeoutError"),
        (ValueError(" "), "ValueError"),
        (StateDictError(), "StateDictError"),
        (StateDictError("torn"), "torn"),
        (KeyError("answer"), "KeyError: 'answer'"),
    ],
)
def test_reason_is_never_empty(error: Exception, text: str):
    assert reason(error) == text
    assert not summary(error).rstrip().endswith(":")
