"""Orderly shutdown of a program when something in its event loop exits."""

import asyncio
import subprocess
import sys

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


def test_run_to_its_end_does_not_wait_for_hanging_threads():
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout.split() == ["others", "ended"]
