"""Agent processes of this process: marked at their start, and killed with all their children."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count

from titan_rl.core.calls.threads import in_thread
from titan_rl.tasks.agents import reaper


class AgentProcesses:
    """Marks agents, and kills all processes with a mark, including their children. Made by `agent_processes`."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._numbers = count()
        self._doomed: dict[str, asyncio.Future[None]] = {}
        self._killing: asyncio.Task[None] | None = None

    def new_mark(self) -> str:
        """New mark for `reaper.VARIABLE` in the environment of one agent."""
        return f"{self._owner}.{next(self._numbers)}"

    async def kill(self, mark: str) -> None:
        """Kill all processes with the mark, and wait for that. Continues if the caller is cancelled.

        Raises:
            OSError, RuntimeError: processes cannot be listed, for lack of descriptors or threads.
        """
        ended = self._doomed.get(mark) or asyncio.get_running_loop().create_future()
        self._doomed[mark] = ended
        if self._killing is None:
            self._killing = asyncio.create_task(self._kill())
        await asyncio.shield(ended)

    async def close(self) -> None:
        if self._killing is not None:
            await self._killing
        await in_thread(reaper.kill_marked, lambda mark: mark.startswith(f"{self._owner}."))

    async def _kill(self) -> None:
        """Kill all requested marks in one scan of the processes, since a scan takes a while."""
        try:
            while doomed := self._doomed:
                self._doomed = {}
                try:
                    await in_thread(reaper.kill_marked, lambda mark, doomed=doomed: mark in doomed)
                except Exception as error:
                    for ended in doomed.values():
                        ended.set_exception(error)
                else:
                    for ended in doomed.values():
                        ended.set_result(None)
        finally:
            self._killing = None


@asynccontextmanager
async def agent_processes() -> AsyncGenerator[AgentProcesses]:
    """Context of agent processes. At its end none is left, even if this process is killed meanwhile."""
    owner = secrets.token_hex(16)
    watching = _watch(owner)
    processes = AgentProcesses(owner)
    try:
        yield processes
    finally:
        try:
            await asyncio.shield(processes.close())
        finally:
            watching.kill()
            watching.communicate()


def _watch(owner: str) -> subprocess.Popen[bytes]:
    """Start a process that kills the agents of this one once this one has ended."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, owner],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is not for it
    )
