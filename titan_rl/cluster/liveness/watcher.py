"""Who tells of a process, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from titan_rl.cluster.liveness.kernel_watch import CAN_WATCH, WatchedProcess
from titan_rl.cluster.liveness.vital_signs import Signs

OnEnd = Callable[[str], None]
OnSigns = Callable[[Signs], None]


class Watched(Protocol):
    """One process that is watched."""

    def kill(self) -> None: ...

    def close(self) -> None:
        """Watch no longer: whatever ends now was told to."""
        ...


class Watcher(Protocol):
    """Of the processes of one host."""

    def watch(self, pid: int, on_end: OnEnd, on_signs: OnSigns) -> Watched | None:
        """
        Args:
            on_end: told once, in the running event loop, how the process ended.
            on_signs: told there what signs of life it gives, now and then while it gives none.

        Returns:
            None where nobody can tell, and Monarch has to.

        Raises:
            ProcessLookupError: there is no such process.
        """
        ...


class KernelWatcher:
    """Of the processes of this host, of their ends alone."""

    def watch(self, pid: int, on_end: OnEnd, on_signs: OnSigns) -> Watched | None:
        return WatchedProcess(pid, on_end) if CAN_WATCH else None
