"""Played demonstrations: any environment, time limits, and errors with their source line."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from titan_rl import MessageObservation, MessageStep, RolloutStatus
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.rollout.task import DEMONSTRATED_CALL_S, Demonstration
from titan_rl.tasks import message_task
from titan_rl.tasks.message_task import demonstrated

OPENING = MessageObservation([{"role": "user", "content": "2 + 3?"}])
END = MessageStep(status=RolloutStatus.COMPLETED)


GATE = threading.Event()


@pytest.fixture(autouse=True, scope="module")
def release_blocked_threads() -> Iterator[None]:
    yield
    GATE.set()


class Env:
    def __init__(self) -> None:
        self.closed = 0

    async def reset(self) -> Any:
        return OPENING

    async def step(self, message: Any) -> Any:
        return END

    async def close(self) -> None:
        self.closed += 1


class PlainEnv:
    def __init__(self) -> None:
        self.closed = 0

    def reset(self) -> Any:
        return OPENING

    def step(self, message: Any) -> Any:
        return END

    def close(self) -> None:
        self.closed += 1


class NumberEnv(Env):
    async def step(self, message: Any) -> Any:
        return 0.5


class PlainNumberEnv(PlainEnv):
    def reset(self) -> Any:
        return 0.5


class AwaitsForever(Env):
    async def step(self, message: Any) -> Any:
        await asyncio.Event().wait()


class BlocksTheLoop(Env):
    async def step(self, message: Any) -> Any:
        GATE.wait()


class BlocksForever(PlainEnv):
    def step(self, message: Any) -> Any:
        GATE.wait()  # in its thread


class Broken(Env):
    async def step(self, message: Any) -> Any:
        return {}["answer"]


def say_5(messages: Any) -> str:
    return "5"


def block_forever(messages: Any) -> str:
    GATE.wait()
    return "5"


def played(env: Any, player: Callable[[Any], Any] = say_5, limit_s: float = 0.05) -> list[Demonstration]:
    def play() -> list[Demonstration]:
        DEMONSTRATED_CALL_S.set(limit_s)
        return list(demonstrated([(env, player)] * 2))

    return contextvars.copy_context().run(play)


@pytest.mark.parametrize("make", [Env, PlainEnv])
def test_async_and_sync_environments_are_demonstrated_alike(make: type[Any]) -> None:
    env = make()
    said = [*OPENING.messages, {"role": "assistant", "content": "5"}]
    assert [list(one.messages) for one in played(env, limit_s=60.0)] == [said, said]
    assert env.closed == 2


class ClearsItsMessages(Env):
    """Environment that changes the messages that it gets and those that it gave."""

    async def reset(self) -> Any:
        self.given: list[Any] = [{"role": "user", "content": "2 + 3?"}]
        return MessageObservation(self.given)

    async def step(self, message: Any) -> Any:
        message.clear()
        self.given[0].clear()
        self.given.clear()
        return END


def test_environment_that_clears_messages_does_not_change_the_demonstration() -> None:
    said = [*OPENING.messages, {"role": "assistant", "content": "5"}]

    def clearing(messages: Any) -> str:
        messages[0].clear()
        return "5"

    for player in (say_5, clearing):
        assert [list(one.messages) for one in played(ClearsItsMessages(), player, limit_s=60.0)] == [said, said]


async def test_demonstrations_run_inside_a_running_event_loop() -> None:
    assert len(played(Env(), limit_s=60.0)) == 2


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (NumberEnv(), r"step of .*test_demonstrating.py:\d+ returned a float; a MessageStep is expected"),
        (PlainNumberEnv(), r"reset of .*test_demonstrating.py:\d+ returned a float; a MessageObservation is expected"),
        (Broken(), r"KeyError: 'answer' \(.*test_demonstrating.py:\d+ in step\)"),
    ],
)
def test_environment_error_gives_the_source_line(env: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        played(env, limit_s=60.0)


@pytest.mark.parametrize("env", [AwaitsForever(), BlocksForever()])
def test_environment_timeout_gives_the_source_line(env: Any) -> None:
    with pytest.raises(DataError, match=r"env_timeout_s \(.*test_demonstrating.py:\d+ in step\)"):
        played(env)


def test_blocking_coroutine_timeout_gives_the_source_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_task, "GRACE_S", 0.05)
    with pytest.raises(DataError, match=r"longer than 0.05 s: .*test_demonstrating.py:\d+ in step blocks .*await"):
        played(BlocksTheLoop())


async def await_forever(messages: Any) -> str:
    await asyncio.Event().wait()
    return "5"


@pytest.mark.parametrize("player", [block_forever, await_forever])
def test_player_timeout_gives_the_source_line(player: Any) -> None:
    line = rf"\(.*test_demonstrating.py:\d+ in {player.__name__}\)"
    with pytest.raises(DataError, match=rf"the player took longer than env_timeout_s {line}"):
        played(Env(), player)


class ClosesForever(Env):
    async def close(self) -> None:
        self.closed += 1
        await asyncio.Event().wait()


def test_close_timeout_ends_demonstrations_with_the_source_line() -> None:
    env = ClosesForever()
    line = r"\(.*test_demonstrating.py:\d+ in close\)"
    with pytest.raises(DataError, match=rf"closing ClosesForever: .*longer than 0.05 s {line}"):
        played(env)
    assert env.closed == 1


def test_rejects_a_player_reply_that_is_neither_text_nor_message() -> None:
    with pytest.raises(DataError, match=r"the player of .*test_demonstrating.py:\d+ in <lambda> returned 5; text or a"):
        played(Env(), lambda messages: 5, 60.0)


def test_library_errors_are_not_wrapped() -> None:
    def refuse(messages: Any) -> str:
        raise ConfigError("task.answers is empty")

    with pytest.raises(ConfigError, match=r"task\.answers is empty"):
        played(Env(), refuse, 60.0)
