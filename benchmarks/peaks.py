"""Peak memory of some work."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

CONTEXT = multiprocessing.get_context("spawn")


def peak_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """Run some work, and return (its peak memory in bytes, beyond the memory before it; its result)."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    result = work()
    return _status("VmHWM") - before, result


def in_its_own_process(work: Callable[..., T], *args: Any) -> T:
    """Run some work in a separate process, so that the peaks of different parts are independent.

    Raises:
        BrokenProcessPool: the process died.
    """
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(work, *args).result()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
