"""How tests of hosts wait for what comes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from background import HANG_S


def until(done: Callable[[], object], what: str | Callable[[], object]) -> None:
    """Returns once it is done.

    Args:
        what: is not, for the message.
    """
    deadline = time.monotonic() + HANG_S
    while not done():
        assert time.monotonic() < deadline, f"not in {HANG_S:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)
