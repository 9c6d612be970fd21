"""Orderly shutdown of a program when something in its event loop exits."""

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from titan_rl.run.process.signals import run_to_its_end


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_exit_in_a_task_or_callback_cancels_the_program_for_cleanup(kind):
    seen = []

    async def exits(number):
        raise kind(number)

    def exits_at_once():
        raise kind(2)

    async def program():
        tasks = [asyncio.ensure_future(exits(0)), asyncio.ensure_future(exits(1))]
        helper = asyncio.ensure_future(asyncio.sleep(1000, "what it saved"))
        asyncio.get_running_loop().call_soon(exits_at_once)
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            for _ in range(5):
                await asyncio.sleep(0)
            # Retrieve the exceptions, or the garbage collector would log them.
            seen.append({type(task.exception()) for task in tasks})
            seen.append(helper.cancelled())  # the cleanup may need it
            raise

    with pytest.raises(kind) as raised:
        run_to_its_end(program())
    assert seen == [{kind}, False]
    assert raised.value.args == (0,)


def test_run_to_its_end_returns_or_raises_like_the_program():
    async def program(error):
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return 3

    assert run_to_its_end(program(None)) == 3
    for error in (KeyError("a"), asyncio.CancelledError(), SystemExit(4)):
        with pytest.raises(type(error)):
            run_to_its_end(program(error))


HANGING = """
import asyncio, threading
from titan_rl.run.process.signals import run_to_its_end

async def program():
    hanging = [asyncio.ensure_future(asyncio.to_thread(threading.Event().wait)) for _ in range(40)]
    await asyncio.sleep(0)
    print(await asyncio.to_thread(str, "others"))
    return hanging

run_to_its_end(program())
print("ended")
"""


async def test_program_runs_in_the_main_thread_while_the_running_loop_waits() -> None:
    """As in a notebook: signals, and the interruption of late calls, work in the main thread alone."""
    outer, task = asyncio.get_running_loop(), asyncio.current_task()

    async def program() -> threading.Thread:
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is not outer
        return threading.current_thread()

    async def interrupted() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await asyncio.sleep(1000)

    assert run_to_its_end(program()) is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_to_its_end(interrupted())
    finally:
        signal.signal(signal.SIGINT, before)
    await asyncio.sleep(0)
    assert (asyncio.get_running_loop(), asyncio.current_task()) == (outer, task)


def test_run_to_its_end_does_not_wait_for_hanging_threads():
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout.split() == ["others", "ended"]
