"""What the garbage collector need not look at. Standard library only."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


def settle_heap() -> None:
    """Have later collections skip what is there now. Called once a process has all that stays: its modules, its engine.

    Else each full collection goes through them again, which stops everything for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def settled_heap() -> Generator[None]:
    """`settle_heap` for the length of a block. What is skipped at exit, native modules report as leaked."""
    settle_heap()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def growing_heap() -> Generator[None]:
    """No collections while a process gets what stays: for the import of vLLM they take a quarter of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
