"""What watches the processes of the controller's own host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from titan_rl.cluster.liveness.host_watch import LOOK_S, HostWatch
from titan_rl.cluster.liveness.kernel_watch import CAN_WATCH, WatchedProcess
from titan_rl.cluster.liveness.loop_thread import LoopThread
from titan_rl.cluster.liveness.vital_signs import Signs
from titan_rl.cluster.liveness.watcher import OnEnd, OnSigns, Watched

logger = logging.getLogger(__name__)


class LocalLookout:
    """The `Watcher` of this host's processes, as a context manager, entered in the event loop in which what it tells is
    told. The kernel tells there of their ends; a thread pings them, whatever that loop is at.

    Attributes:
        path: of the socket where they begin their pulse; None where the kernel tells nothing of processes.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._on_signs: dict[int, OnSigns] = {}  # by pid
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> LocalLookout:
        if not CAN_WATCH:
            return self
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as opened:
            self.path = Path(opened.enter_context(TemporaryDirectory(prefix="pulse"))) / "s"
            self._watch = HostWatch(self.path, lambda pid, how: None)
            failed = partial(logger.error, "the lookout ended: %r")
            opened.enter_context(LoopThread("lookout", self._run, failed))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def watch(self, pid: int, on_end: OnEnd, on_signs: OnSigns) -> Watched | None:
        if not CAN_WATCH:
            return None

        def ended(how: str) -> None:
            self._on_signs.pop(pid, None)
            on_end(how)

        watched = WatchedProcess(pid, ended)
        self._on_signs[pid] = on_signs
        return _LocalWatch(watched, lambda: self._on_signs.pop(pid, None))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run())
            while True:
                await asyncio.sleep(LOOK_S)
                if signs := self._watch.look():
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        self._loop.call_soon_threadsafe(self._tell, signs)

    def _tell(self, signs: dict[int, Signs]) -> None:
        for pid, of_one in signs.items():
            if (on_signs := self._on_signs.get(pid)) is not None:
                on_signs(of_one)


class _LocalWatch:
    def __init__(self, watched: WatchedProcess, forget: Callable[[], object]) -> None:
        self._watched = watched
        self._forget = forget
        self.kill = watched.kill

    def close(self) -> None:
        self._forget()
        self._watched.close()
