"""The processes of all agents that this process runs, and that nothing of them is left."""

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
    """Marks agents, and kills those with a mark with all that they have started. Made by `agent_processes`."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._numbers = count()
        self._doomed: dict[str, asyncio.Future[None]] = {}
        self._killing: asyncio.Task[None] | None = None

    def new_mark(self) -> str:
        """For `reaper.VARIABLE` in the environment of one agent."""
        return f"{self._owner}.{next(self._numbers)}"

    async def kill(self, mark: str) -> None:
        """Returns when no process has the mark. It goes on if the caller is cancelled.

        Raises:
            OSError, RuntimeError: this process cannot look, as where it has no descriptors or threads left.
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
        """Those that are to be killed at once are looked for at once, since looking takes a while."""
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
    """At the end of the block no agent is left; nor if this process is killed in it."""
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
    """A process that ends the agents of this one when it hears that this one has ended."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, owner],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is not for it
    )
