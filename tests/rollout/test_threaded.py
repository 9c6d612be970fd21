"""Environments in threads: blocking ones delay no others, and hanging ones are abandoned."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from background import HANG_S

from titan_rl import (
    Completion,
    FinishReason,
    MessageObservation,
    MessageStep,
    RolloutStatus,
    SamplingParams,
    VersionSpan,
)
from titan_rl import TokenObservation as Observation
from titan_rl import TokenStep as Step
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.environment.threaded import ThreadedEnv
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.settings import RolloutConfig

RUBRIC = Rubric([Reward(lambda rollout: 1.0, name="one")])


def nothing() -> None: ...


class Blocking:
    """Sync environment of one turn. `on_reset` and `on_step` are called first in their methods, in the thread."""

    def __init__(self, on_reset: Callable[[], object] = nothing, on_step: Callable[[], object] = nothing) -> None:
        self.threads = [threading.get_ident()]
        self.closed = threading.Event()
        self._on_reset, self._on_step = on_reset, on_step

    def reset(self) -> Observation:
        self.threads.append(threading.get_ident())
        self._on_reset()
        return Observation([1, 2, 3])

    def step(self, completion: Completion) -> Step:
        self.threads.append(threading.get_ident())
        self._on_step()
        return Step(status=RolloutStatus.COMPLETED)

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        self.closed.set()


async def generate(prompt_token_ids: Any, *, request_id: str, **kwargs: Any) -> Completion:
    return Completion(request_id, [5], [-0.5], FinishReason.STOP, (VersionSpan(0, 1),))


async def play(make_env: Callable[[Any], Any], size: int = 1, **limits: Any) -> Any:
    rollouter = Rollouter(
        make_env,
        Rubric([Reward(lambda rollout: 1.0, name="one")]),
        max_context=64,
        limits=RolloutConfig(env_in_thread=True, **limits),
    )
    group = await rollouter.run_group(
        generate, None, group_id="g", group_size=size, sampling=SamplingParams(max_tokens=4)
    )
    return group.rollouts


async def test_environment_stays_in_one_thread_from_creation_to_close() -> None:
    made: list[Blocking] = []

    def make_env(sample: Any) -> Blocking:
        made.append(Blocking())
        return made[-1]

    rollouts = await play(make_env, size=2)
    assert [rollout.status for rollout in rollouts] == [RolloutStatus.COMPLETED] * 2
    threads = [set(env.threads) for env in made]
    assert [len(used) for used in threads] == [1, 1]
    assert len(set.union(*threads, {threading.get_ident()})) == 3


async def test_blocking_siblings_run_concurrently() -> None:
    everyone = threading.Barrier(4)
    rollouts = await play(lambda sample: Blocking(on_step=lambda: everyone.wait(10)), size=4)
    assert [rollout.status for rollout in rollouts] == [RolloutStatus.COMPLETED] * 4


@pytest.mark.looptime
async def test_time_limit_ends_the_wait_for_a_blocking_environment() -> None:
    release, made = threading.Event(), list[Blocking]()

    def make_env(sample: Any) -> Blocking:
        release.wait()
        made.append(Blocking())
        return made[-1]

    (rollout,) = await play(make_env, env_timeout_s=10.0)
    assert rollout.status is RolloutStatus.ERROR_TIMEOUT
    assert rollout.metrics["seconds"] == pytest.approx(10.0)
    assert not made
    release.set()


async def test_environment_that_returns_late_is_then_closed() -> None:
    reached, release, made = threading.Event(), threading.Event(), list[Blocking]()

    def block() -> None:
        reached.set()
        release.wait()

    def make_env() -> Blocking:
        made.append(Blocking(on_step=block))
        return made[-1]

    env = ThreadedEnv(make_env)
    await env.reset()
    step = asyncio.ensure_future(env.step(None))
    await asyncio.to_thread(reached.wait, 10)
    step.cancel()
    await asyncio.wait({step})
    await env.close()  # does not wait
    assert not made[0].closed.is_set()
    release.set()
    assert await asyncio.to_thread(made[0].closed.wait, 10)
    assert len(set(made[0].threads)) == 1


async def test_exception_in_the_thread_is_an_environment_error() -> None:
    class Odd(Exception):
        pass

    errors: list[BaseException] = [Odd("lost"), StopIteration("end"), SystemExit(3), asyncio.CancelledError()]

    def make_env(sample: Any) -> Blocking:
        error = errors[len(texts)]

        def fail() -> None:
            raise error

        return Blocking(on_step=fail)

    texts: list[str] = []
    while len(texts) < len(errors):
        (rollout,) = await play(make_env)
        assert rollout.status is RolloutStatus.ERROR_ENV
        texts.append(rollout.error or "")
    assert [text.partition(":")[0] for text in texts] == ["Odd", "RuntimeError", "SystemExit", "CancelledError"]


class Talk:
    """Sync message environment."""

    def reset(self) -> MessageObservation:
        return MessageObservation([{"role": "user", "content": "go"}])

    def step(self, message: Any) -> MessageStep:
        return MessageStep(status=RolloutStatus.COMPLETED, rewards={"a": 1.0})

    def close(self) -> None: ...


class Renderer:
    def render_ids(self, messages: Any, **kwargs: Any) -> list[int]:
        return [1, 2]

    def parse_response(self, token_ids: Any, **kwargs: Any) -> Any:
        from titan_rl.rollout.renderer.chat_template import ParsedText

        return ParsedText("hi")


async def test_sync_message_environment_runs_with_a_renderer() -> None:
    make_envs: list[Callable[[Any], Any]] = [
        lambda sample: MessageTokenEnv(Talk(), Renderer()),  # pyright: ignore
        lambda sample: MessageTokenEnv(ThreadedEnv(Talk), Renderer()),  # pyright: ignore
    ]
    for make_env in make_envs:
        (rollout,) = await play(make_env)
        assert rollout.status is RolloutStatus.COMPLETED, rollout.error
        assert rollout.turns[0].rewards == {"a": 1.0}


async def test_coroutine_in_the_thread_is_cancelled_with_its_caller() -> None:
    reached, ended = threading.Event(), threading.Event()

    class Waiting(Blocking):
        async def step(self, completion: Completion) -> Step:  # pyright: ignore
            try:
                reached.set()
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

    env = ThreadedEnv(Waiting)
    await env.reset()
    step = asyncio.ensure_future(env.step(None))
    await asyncio.to_thread(reached.wait, 10)
    step.cancel()
    await asyncio.wait({step})
    await asyncio.to_thread(ended.wait, 10)
    assert step.cancelled()
    assert ended.is_set()
    await env.close()


def test_process_exits_while_an_environment_blocks() -> None:
    program = """
import asyncio, threading
from titan_rl.rollout.environment.threaded import ThreadedEnv

async def main():
    env = ThreadedEnv(lambda: threading.Event().wait())
    try:
        await asyncio.wait_for(env.reset(), 0.01)
    except TimeoutError:
        await env.close()
        print("left")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "left\n"


async def test_sync_methods_run_in_a_thread_without_a_setting() -> None:
    env = Blocking()
    rollouter = Rollouter(lambda _: env, RUBRIC, max_context=64)  # pyright: ignore[reportArgumentType]
    group = await rollouter.run_group(generate, None, group_id="g", group_size=1, sampling=SamplingParams(max_tokens=4))
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.COMPLETED]
    made_in, *called_in = env.threads
    assert len(set(called_in)) == 1
    assert called_in[0] != made_in == threading.get_ident()
    assert len(called_in) == 3
    assert env.closed.is_set()


@pytest.mark.parametrize("method", ["on_reset", "on_step"])
@pytest.mark.parametrize("in_thread", [False, True])
async def test_hanging_sync_method_is_named_and_closed_when_it_returns(method: str, in_thread: bool) -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait()

    env = Blocking(**{method: hang})
    limits = RolloutConfig(env_timeout_s=1.0, env_in_thread=in_thread)
    rollouter = Rollouter(lambda _: env, RUBRIC, max_context=64, limits=limits)  # pyright: ignore[reportArgumentType]
    group = await rollouter.run_group(generate, None, group_id="g", group_size=1, sampling=SamplingParams(max_tokens=4))
    (rollout,) = group.rollouts
    assert rollout.status is RolloutStatus.ERROR_TIMEOUT
    assert rollout.failure is not None
    assert "test_threaded.py" in str(rollout.failure.where)
    assert str(rollout.failure.where).endswith("in hang")
    assert not env.closed.is_set()
    release.set()
    assert await asyncio.to_thread(env.closed.wait, 10)


async def test_hanging_coroutine_is_named() -> None:
    class Waits(Blocking):
        async def step(self, completion: Completion) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
            await self.inner()
            raise AssertionError

        async def inner(self) -> None:
            await asyncio.Event().wait()

    rollouter = Rollouter(
        lambda _: Waits(),  # pyright: ignore[reportArgumentType]
        RUBRIC,
        max_context=64,
        limits=RolloutConfig(env_timeout_s=1.0),
    )
    group = await rollouter.run_group(generate, None, group_id="g", group_size=1, sampling=SamplingParams(max_tokens=4))
    (rollout,) = group.rollouts
    assert rollout.failure is not None
    assert str(rollout.failure.where).endswith("in inner")


async def test_sync_method_may_return_an_awaitable() -> None:
    class Passes(Blocking):
        def step(self, completion: Completion) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.inner()

        async def inner(self) -> Step:
            await asyncio.sleep(0)
            self.loop = asyncio.get_running_loop()
            return Step(status=RolloutStatus.COMPLETED)

    env = Passes()
    rollouter = Rollouter(lambda _: env, RUBRIC, max_context=64)  # pyright: ignore[reportArgumentType]
    group = await rollouter.run_group(generate, None, group_id="g", group_size=1, sampling=SamplingParams(max_tokens=4))
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.COMPLETED]
    assert env.loop is asyncio.get_running_loop()
