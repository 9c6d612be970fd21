"""The watchdog names the call that blocks the event loop, and is silent otherwise."""

import asyncio
import logging
import re
import threading
from typing import Any

import pytest

from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.console import Console


class Listener(Console):
    """Console that records the watchdog's messages. The first one releases the blocking call."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.heard = threading.Event()
        self.continued = threading.Event()

    def warning(self, text: str) -> None:
        self.messages.append(text)
        self.heard.set()
        if "continues" in text:
            self.continued.set()


async def blocks(listener: Listener) -> None:
    assert listener.heard.wait(30)  # like time.sleep


async def test_blocking_call_is_named_while_it_blocks(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    with caplog.at_level(logging.WARNING), LoopWatchdog(listener, blocked_after_s=0.05):
        await blocks(listener)
        assert await asyncio.to_thread(listener.continued.wait, 30)
    assert re.search(r"\btest_watchdog.py:\d+ in blocks blocks it", listener.messages[0])
    assert "asyncio.to_thread" in listener.messages[0]
    assert "continues after" in listener.messages[-1]
    assert "listener.heard.wait(30)" in caplog.text  # the stack


async def test_responsive_event_loop_gives_no_warning() -> None:
    listener = Listener()
    with LoopWatchdog(listener, blocked_after_s=5.0):
        for _ in range(100):
            await asyncio.sleep(0)
    assert listener.messages == []


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), None])
def test_invalid_blocked_after_s_is_rejected(seconds: Any) -> None:
    with pytest.raises(ValueError, match="blocked_after_s"):
        LoopWatchdog(blocked_after_s=seconds)


@pytest.mark.parametrize("error", [OSError("no screen"), SystemExit(1)])
async def test_failing_console_does_not_end_the_watchdog(error: BaseException) -> None:
    heard: list[str] = []
    second = threading.Event()

    class Broken(Console):
        def warning(self, text: str) -> None:
            heard.append(text)
            if len(heard) == 2:
                second.set()
            raise error

    with LoopWatchdog(Broken(), blocked_after_s=0.05):
        assert second.wait(30)
    assert heard[0].startswith("the event loop has been blocked for 0 s")


def test_watchdog_that_outlives_its_loop_ends(caplog: Any) -> None:
    watchdog = LoopWatchdog(blocked_after_s=0.05)

    async def enter() -> None:
        watchdog.__enter__()

    asyncio.run(enter())
    watchdog.__exit__(None, None, None)


async def test_watchdog_can_be_stopped_at_any_moment() -> None:
    for _ in range(300):
        with LoopWatchdog(blocked_after_s=0.0001):
            await asyncio.sleep(0)
