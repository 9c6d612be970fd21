"""Garbage collection and free memory of long-lived processes. Standard library only."""

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
    """Return to the kernel what the C allocator holds free.

    A burst of messages, or tensors of many sizes, leaves free memory between what is in use, and glibc keeps it. Other
    allocators return it by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def begin_returning_memory() -> None:
    """Start a thread that calls `return_free_memory` once a minute, for as long as this process lives."""

    def run() -> None:
        while True:
            time.sleep(TRIM_INTERVAL_S)
            return_free_memory()

    threading.Thread(target=run, name="free-memory", daemon=True).start()


def settle_heap() -> None:
    """Have later collections skip what is there now. Called once a process has all that stays: its modules, its engine.

    Else each full collection goes through them again, which stops everything for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def settled_heap() -> Generator[None]:
    """`settle_heap` for the length of a block of the running event loop, in which full collections are rare. What is
    skipped at exit, native modules report as leaked; a program that skips something already goes on doing so.

    A full collection looks at all that lives, for seconds where that is the tokens of a hundred thousand requests, and
    is made by default whenever a quarter of it has been renewed. What the planes are done with is freed without it, so
    that it is for cycles in the user's code alone, and has a hundredth of the time.
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
    """No collections while a process gets what stays: for the import of vLLM they take a quarter of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
