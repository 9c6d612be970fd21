"""Event loops whose time passes at once, and ends: a test that waits without end fails there."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import closing
from typing import Any, TypeVar

from background import HANG_S

END_S = 100_000.0
"""End of virtual time, where whatever waits fails. Without it periodic tasks keep a test going that waits in vain."""

T = TypeVar("T")


def in_virtual_time(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in a new event loop."""
    import looptime  # an extra of its own, which tests on GPUs do without

    with closing(looptime.new_event_loop(end=END_S, idle_timeout=HANG_S)) as loop:
        return loop.run_until_complete(coroutine)
