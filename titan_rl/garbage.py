"""What the garbage collector need not look at. Standard library only."""

from __future__ import annotations

import gc


def settle_heap() -> None:
    """Have later collections skip what is there now. Called once a process has all that stays: its modules, its engine.

    Else each full collection goes through them again, which stops everything for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
