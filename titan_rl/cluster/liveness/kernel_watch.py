"""Deaths of processes of this host, as its kernel tells them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from titan_rl.cluster.liveness.process_end import how_it_ended


class WatchedProcess:
    """One process, until it ends or is let go. What has its pid later is not meant.

    Args:
        pid: of a process of this host.
        on_end: called once, in the running event loop: "process 7 was killed by SIGKILL".

    Raises:
        ProcessLookupError: there is none.
    """

    def __init__(self, pid: int, on_end: Callable[[str], None]) -> None:
        self.pid = pid
        self._on_end = on_end
        self._descriptor: int | None = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._ended)

    def kill(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Watch no longer: whatever ends now was told to."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _ended(self) -> None:
        assert self._descriptor is not None
        how = how_it_ended(self._descriptor)
        self.close()
        self._on_end(f"process {self.pid} {how}")


CAN_WATCH = hasattr(os, "pidfd_open")
"""Whether the kernel tells of processes."""
