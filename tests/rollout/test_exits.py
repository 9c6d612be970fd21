"""Exceptions that normally end a program, a generator or a loop do not end a run if user code raises them."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from background import HANG_S
from stage import Env, Generator, Stage

from titan_rl import Completion, FailurePolicy, GroupReward, Reward, Rollout, RolloutGroup, RolloutStatus, Rubric
from titan_rl.core.calls.bounded import bounded
from titan_rl.core.console import ConsoleLines
from titan_rl.core.errors import DataError, RewardError
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.task import calling
from titan_rl.run.observability.sinks import Sinks

T = TypeVar("T")


class PanicException(BaseException):
    """Like the exception of extensions written in Rust."""


KINDS = (
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    PanicException,
    asyncio.CancelledError,
    StopIteration,
    StopAsyncIteration,
)
kinds = pytest.mark.parametrize("kind", KINDS)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run in a new event loop, which an escaping exception would end."""
    try:
        return asyncio.run(asyncio.wait_for(work, HANG_S))
    except BaseException as error:
        if isinstance(error, RewardError):
            raise
        pytest.fail(f"{error!r} escaped")


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def raising_later(error: BaseException) -> Callable[..., Any]:
    async def fail(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        raise error

    return fail


@kinds
@pytest.mark.parametrize("where", ["make_env", "reset", "step"])
@pytest.mark.parametrize("how", ["sync", "async", "sync in a thread", "async in a thread"])
def test_exit_in_an_environment_is_an_environment_error(kind: type[BaseException], where: str, how: str) -> None:
    def make(sample: Any) -> Env:
        error = kind("over")
        if where == "make_env":
            raise error
        env = Env()
        setattr(env, where, (raising if how.startswith("sync") else raising_later)(error))
        return env

    limits = RolloutConfig(env_in_thread="thread" in how, max_retries=0)
    stage = Stage(make, limits=limits)
    (rollout,) = run(stage.group(Generator())).rollouts
    assert rollout.status is RolloutStatus.ERROR_ENV
    assert kind.__name__ in (rollout.error or "")
    assert rollout.failure is not None
    assert (rollout.failure.where or "").startswith("tests/rollout/test_exits.py:")
    assert [env.closed for env in stage.envs] == [1] * len(stage.envs)


@kinds
@pytest.mark.parametrize("in_thread", [False, True])
def test_exit_in_close_sets_close_failed(kind: type[BaseException], in_thread: bool) -> None:
    async def fail(env: Env) -> None:
        raise kind("over")

    stage = Stage(lambda _: Env(on_close=fail), limits=RolloutConfig(env_in_thread=in_thread))
    (rollout,) = run(stage.group(Generator())).rollouts
    assert (rollout.status, rollout.metrics["close_failed"]) == (RolloutStatus.COMPLETED, 1.0)


@kinds
@pytest.mark.parametrize("how", ["sync", "async", "thread", "group", "async group"])
def test_exit_in_a_reward_fails_its_group(kind: type[BaseException], how: str) -> None:
    fail = (raising_later if "async" in how else raising)(kind("over"))
    once = FailurePolicy(retries=0)
    if "group" in how:
        reward: Any = GroupReward(fail, name="bad", on_failure=once)
    else:
        reward = Reward(fail, name="bad", in_thread=how == "thread", on_failure=once)
    group: RolloutGroup = run(Stage(rubric=Rubric([reward])).group(Generator(), size=2))
    assert group.failure is not None
    assert "reward 'bad'" in group.failure.error
    assert kind.__name__ in group.failure.error or kind is asyncio.CancelledError


@kinds
def test_exit_in_generate_is_a_generation_error(kind: type[BaseException]) -> None:
    (rollout,) = run(Stage().group(raising_later(kind("over")))).rollouts
    assert rollout.status is RolloutStatus.ERROR_GENERATE
    assert kind.__name__ in (rollout.error or "") or kind is asyncio.CancelledError


@kinds
def test_exit_in_an_advantage_is_a_reward_error(kind: type[BaseException]) -> None:
    with pytest.raises(RewardError, match=kind.__name__):
        run(Stage(advantage=raising(kind("over"))).group(Generator()))


@kinds
def test_exit_in_a_task_is_a_data_error(kind: type[BaseException]) -> None:
    async def called() -> None:
        with pytest.raises(DataError, match=kind.__name__), calling("train_sample(0, 1)"):
            raise kind("over")

    run(called())


@kinds
def test_exit_in_a_callback_or_metric_sink_is_only_logged(kind: type[BaseException], caplog: Any) -> None:
    class Sink:
        log = staticmethod(raising(kind("over")))

        def close(self) -> None: ...

    def on_finished(rollout: Rollout) -> None:
        raise kind("over")

    async def log_and_play() -> RolloutGroup:
        Sinks({"odd": Sink()}, messages).log(1, {})
        return await Stage().group(Generator(), on_finished=on_finished)

    messages = ConsoleLines()
    with caplog.at_level(logging.ERROR):
        group = run(log_and_play())
    assert group.rollouts[0].status is RolloutStatus.COMPLETED
    assert "on_finished failed" in caplog.text
    assert len(messages) == 1
    assert kind.__name__ in messages[0]


@kinds
def test_exit_in_a_bounded_call_becomes_an_exception(kind: type[BaseException]) -> None:
    async def call() -> str:
        try:
            return await bounded(raising_later(kind("over"))(), None, "a call")
        except Exception as error:
            return repr(error.__cause__ or error)

    assert kind.__name__ in run(call())


def test_ctrl_c_in_user_code_ends_the_program() -> None:
    class Pressed(Env):
        async def step(self, completion: Completion) -> Any:
            signal.raise_signal(signal.SIGINT)  # asyncio cancels the program
            signal.raise_signal(signal.SIGINT)  # and ends it
            return await super().step(completion)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(Stage(lambda _: Pressed()).group(Generator()))
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")  # Python warns the environment's author
@pytest.mark.parametrize("in_thread", [False, True])
def test_awaitable_from_a_sync_environment_is_awaited_within_its_limit(in_thread: bool) -> None:
    class Never(Env):
        def step(self, completion: Completion) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return asyncio.Future[Any](loop=loops.setdefault("foreign", asyncio.new_event_loop()))

    class Nested(Env):
        def step(self, completion: Completion) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            async def inner() -> Any:
                return super(Nested, self).step(completion)  # itself awaitable, and never awaited

            return inner()

    loops: dict[str, asyncio.AbstractEventLoop] = {}
    limits = RolloutConfig(env_in_thread=in_thread, env_timeout_s=1.0, max_retries=0)
    try:
        for env, message in (
            (Never, "attached to a different loop"),
            (Nested, "returned a coroutine; a TokenStep is expected"),
        ):
            (rollout,) = run(Stage(lambda _, env=env: env(), limits=limits).group(Generator())).rollouts
            assert rollout.status is RolloutStatus.ERROR_ENV
            assert message in (rollout.error or "")
    finally:
        for loop in loops.values():
            loop.close()
