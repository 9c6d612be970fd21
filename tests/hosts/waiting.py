"""Polling helper for tests of hosts."""

from __future__ import annotations

import time
from collections.abc import Callable

from background import HANG_S


def until(done: Callable[[], object], what: str | Callable[[], object]) -> None:
    """Poll until `done` returns a true value.

    Args:
        what: Description of the awaited event for the error message.
    """
    deadline = time.monotonic() + HANG_S
    while not done():
        assert time.monotonic() < deadline, f"not in {HANG_S:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)
