"""Event loops with virtual time that has an end, so that a test that waits forever fails."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import closing
from typing import Any, TypeVar

from background import HANG_S

END_S = 100_000.0
"""End of virtual time, where all waits fail. Without it periodic tasks would keep a hanging test running."""

T = TypeVar("T")


def in_virtual_time(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion in a new event loop."""
    import looptime  # imported here, since tests on GPUs run without it

    with closing(looptime.new_event_loop(end=END_S, idle_timeout=HANG_S)) as loop:
        return loop.run_until_complete(coroutine)
