"""Garbage collection and free memory of long-lived processes. Imports only the standard library."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

LEAST_APART_S = 10.0
MOST_OF_TIME = 0.01
NEVER = 1 << 30
TRIM_INTERVAL_S = 60.0


def return_free_memory() -> None:
    """Return memory that the C allocator holds free to the kernel.

    A burst of messages, or tensors of many sizes, leaves free memory between used blocks, and glibc keeps it. Other
    allocators return it by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def begin_returning_memory() -> None:
    """Start a thread that calls `return_free_memory` every `TRIM_INTERVAL_S` seconds for the lifetime of the
    process."""

    def run() -> None:
        while True:
            time.sleep(TRIM_INTERVAL_S)
            return_free_memory()

    threading.Thread(target=run, name="free-memory", daemon=True).start()


def settle_heap() -> None:
    """Have later collections skip all current objects. Called once a process has loaded its modules and its engine.
    Otherwise each full collection would traverse them again, which stops the process for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def settled_heap() -> Generator[None]:
    """Context manager that applies `settle_heap` and makes full collections rare, in the running event loop. Native
    modules report skipped objects as leaked at exit, so they are unfrozen after the block, unless objects were frozen
    before.

    A full collection traverses all live objects, which takes seconds with the tokens of a hundred thousand requests. By
    default it runs whenever a quarter of the objects are new. titan_rl's own objects are freed without it, so it is
    needed only for cycles in user code and gets a hundredth of the time.
    """
    loop, thresholds = asyncio.get_running_loop(), gc.get_threshold()
    is_settled = gc.get_freeze_count() > 0
    timer: asyncio.TimerHandle

    def collect() -> None:
        nonlocal timer
        began = time.monotonic()
        gc.collect()
        return_free_memory()
        timer = loop.call_later(max(LEAST_APART_S, (time.monotonic() - began) / MOST_OF_TIME), collect)

    settle_heap()
    gc.set_threshold(*thresholds[:2], NEVER)
    timer = loop.call_later(LEAST_APART_S, collect)
    try:
        yield
    finally:
        timer.cancel()
        gc.set_threshold(*thresholds)
        if not is_settled:
            gc.unfreeze()


@contextmanager
def growing_heap() -> Generator[None]:
    """Context manager without collections, for example during the import of vLLM, of which they take a quarter."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
