"""Daemon threads for blocking functions: their number, the effects of hanging calls, and the exit of the process."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time

import pytest
from background import HANG_S

from titan_rl.core.calls.bounded import OutOfTimeError
from titan_rl.core.calls.threads import DaemonThreads, UsersThreads
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Rollout


class Held:
    """Function that waits until it is released, and counts its concurrent calls."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.release = threading.Event()
        self.lock = threading.Lock()
        self.running = self.most = self.calls = 0

    def __call__(self) -> int:
        with self.lock:
            self.calls += 1
            self.running += 1
            self.most = max(self.most, self.running)
        self.began.release()
        self.release.wait(HANG_S)
        with self.lock:
            self.running -= 1
        self.ended.release()
        return self.calls


async def until(semaphore: threading.Semaphore, count: int = 1) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(semaphore.acquire, timeout=HANG_S)


async def test_pool_runs_at_most_its_size_at_once() -> None:
    threads, held = DaemonThreads(3, "judge"), Held()
    calls = [asyncio.ensure_future(threads.run(held)) for _ in range(10)]
    await until(held.began, 3)
    held.release.set()
    assert len(await asyncio.gather(*calls)) == 10
    assert held.calls == 10
    assert held.most == 3


async def test_hanging_call_times_out_without_blocking_others() -> None:
    threads, held = DaemonThreads(1, "judge"), Held()
    lost = asyncio.ensure_future(threads.run(held, timeout_s=0.05))
    waiting = asyncio.ensure_future(threads.run(lambda: "served", timeout_s=HANG_S))
    with pytest.raises(OutOfTimeError, match=r"it took longer than 0.05 s"):
        await lost
    assert await waiting == "served"
    held.release.set()
    await until(held.ended)
    after = Held()
    calls = [asyncio.ensure_future(threads.run(after)) for _ in range(3)]
    await until(after.began)
    after.release.set()
    await asyncio.gather(*calls)
    assert after.most == 1  # the hanging call has returned, but its thread takes no further calls


async def test_timeout_starts_when_a_thread_starts_the_call() -> None:
    threads, held = DaemonThreads(1, "judge"), Held()
    first = asyncio.ensure_future(threads.run(held))
    second = asyncio.ensure_future(threads.run(lambda: "in time", timeout_s=1.0))
    await asyncio.wait({second}, timeout=1.2)
    assert not second.done()
    held.release.set()
    await first
    assert await second == "in time"


async def test_cancelled_caller_returns_at_once_and_queued_calls_never_run() -> None:
    threads, held, late = DaemonThreads(1, "judge"), Held(), Held()
    first, second = asyncio.ensure_future(threads.run(held)), asyncio.ensure_future(threads.run(late))
    await until(held.began)
    first.cancel()
    second.cancel()
    await asyncio.wait({first, second}, timeout=HANG_S)
    assert first.cancelled()
    third = asyncio.ensure_future(threads.run(lambda: "served"))
    held.release.set()
    assert await third == "served"
    assert late.calls == 0


@pytest.mark.parametrize("error", [ValueError("wrong"), StopIteration("over"), SystemExit(3)], ids=repr)
async def test_exception_reaches_the_caller(error: BaseException) -> None:
    def fails() -> None:
        raise error

    with pytest.raises((ValueError, RuntimeError)) as caught:
        await DaemonThreads(1, "judge").run(fails)
    assert error in (caught.value, caught.value.__cause__)


async def test_function_runs_in_the_context_of_its_caller() -> None:
    group: contextvars.ContextVar[str] = contextvars.ContextVar("group")
    group.set("g17")
    assert await DaemonThreads(1, "judge").run(group.get) == "g17"


async def test_pool_serves_one_event_loop_after_another() -> None:
    threads = DaemonThreads(1, "judge")

    def in_another_loop() -> list[int]:
        async def both() -> list[int]:
            return list(await asyncio.gather(threads.run(lambda: 1), threads.run(lambda: 2)))

        return asyncio.run(both())

    assert await asyncio.to_thread(in_another_loop) == [1, 2]
    assert await threads.run(lambda: 3) == 3


def test_pool_without_threads_is_rejected() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        DaemonThreads(0, "judge")
    with pytest.raises(ValueError, match="max_threads 0"):
        Reward(lambda rollout: 1.0, name="judge", in_thread=True, max_threads=0)


async def test_slow_judges_do_not_occupy_the_default_executor() -> None:
    release = threading.Event()

    def slow(rollout: Rollout) -> float:
        release.wait(HANG_S)
        return 1.0

    rollouts = [Rollout(f"g/{i}", "g", i, None) for i in range(64)]  # more than the default executor has on any machine
    scoring = asyncio.ensure_future(Rubric([Reward(slow, in_thread=True, max_threads=64)]).score(rollouts))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "plan"), HANG_S) == "plan"
    release.set()
    await scoring
    assert [rollout.reward for rollout in rollouts] == [1.0] * 64


HANGING = """
import asyncio, time
from titan_rl.rollout.types import Rollout
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric

def hangs(rollout):
    while True:
        time.sleep(1.0)

async def main():
    try:
        await Rubric([Reward(hangs, in_thread=True, timeout_s=0.1)]).score([Rollout("g/0", "g", 0, None)])
    except Exception as error:
        print(error, flush=True)

asyncio.run(main())
print("ended", flush=True)
"""


def test_hanging_judge_does_not_delay_process_exit() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reward 'hangs' took longer than 0.1 s on rollout 'g/0'")
    assert done.stdout.endswith("ended\n")
    assert time.monotonic() - began < 50


def test_users_threads_return_results_in_order_until_shutdown() -> None:
    threads, order, held = UsersThreads(1), list[int](), Held()
    first = threads.submit(held)
    others = [threads.submit(order.append, number) for number in range(5)]
    cancelled = threads.submit(order.append, 99)
    assert cancelled.cancel()
    failing = threads.submit(lambda: 1 / 0)
    held.release.set()
    assert first.result(HANG_S) == 1
    assert isinstance(failing.exception(HANG_S), ZeroDivisionError)
    assert all(other.done() for other in others)
    assert order == [0, 1, 2, 3, 4]
    hanging = threads.submit(Held())
    threads.shutdown()
    assert not hanging.done()
    with pytest.raises(RuntimeError, match="no more"):
        threads.submit(len, "")
