"""Agent programs: started for one episode with bounded output, and killed with all their children at its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from titan_rl.core.calls.user_code import summary
from titan_rl.rollout.types import RolloutStatus
from titan_rl.serving.episode import Episode
from titan_rl.serving.episode_store import episode_url
from titan_rl.tasks.agents import reaper
from titan_rl.tasks.agents.processes import AgentProcesses

TAIL_BYTES = 4096
_READ_BYTES = 65536


class BoundedOutput:
    """Pipe into a file that keeps the first and the last bytes. Made by `bounded_output`.

    Attributes:
        descriptor: the writing end.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._read, self.descriptor = os.pipe()
        os.set_blocking(self._read, False)
        self._file = path.open("wb")
        self._room = limit
        self._left_out = 0
        self._tail = b""
        self._loop.add_reader(self._read, self._take)

    @property
    def tail(self) -> str:
        """End of the output."""
        return self._tail.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Read the rest and close the file. Call when no process writes to the pipe any more."""
        while self._take():
            pass
        self._loop.remove_reader(self._read)
        os.close(self._read)
        os.close(self.descriptor)
        if self._left_out > len(self._tail):
            self._file.write(f"\n... {self._left_out - len(self._tail)} bytes are left out ...\n".encode())
        self._file.write(self._tail[max(0, len(self._tail) - self._left_out) :])
        with suppress(OSError):  # the disk is full
            self._file.close()

    def _take(self) -> bool:
        try:
            data = os.read(self._read, _READ_BYTES)
        except BlockingIOError:
            return False
        kept = data[: self._room]
        self._room -= len(kept)
        self._left_out += len(data) - len(kept)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        with suppress(OSError):
            self._file.write(kept)
        return bool(data)


@contextmanager
def bounded_output(path: Path, limit: int) -> Generator[BoundedOutput]:
    """Open a bounded output file.

    Args:
        limit: bytes kept from the beginning; of the rest, the last `TAIL_BYTES` are kept.
    """
    output = BoundedOutput(path, limit)
    try:
        yield output
    finally:
        output.close()


_TOLD = 2_000  # characters of an agent's output that an error tells
_DEATH_S = 5.0  # for a process that was killed and is held up in the kernel
OUTPUT = "output.txt"


def agent_environment(base_url: str, episode: Episode) -> dict[str, str]:
    """Environment variables that connect OpenAI and Anthropic clients to an episode, with the URL for its rewards.

    Args:
        base_url: URL of the server: "http://127.0.0.1:8000".
    """
    url = episode_url(base_url, episode)
    no_proxy = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), _host(base_url))))
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": episode.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": episode.key,
        "ANTHROPIC_AUTH_TOKEN": "",  # none: clients warn of two, and the run may have the user's own
        "TITAN_RL_EPISODE_URL": url,
        "TITAN_RL_EPISODE_KEY": episode.key,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


class AgentProgram:
    """Runs a program for an episode until it or the episode ends.

        the program ends with exit code 0       COMPLETED
        another exit code, or it cannot start   ERROR_ENV, with the end of its output
        the episode ends first                  its own status; the program gets SIGTERM and has `end_s` seconds

    In all cases, and on cancellation, all its child processes are killed.

    Args:
        processes: agent processes of this process.
        output_bytes: most output that is kept, in `output.txt` of its folder.
        is_kept: whether an error names that file.
    """

    def __init__(
        self, processes: AgentProcesses, *, output_bytes: int = 1 << 20, end_s: float = 5.0, is_kept: bool = True
    ) -> None:
        self._processes = processes
        self._is_kept = is_kept
        self._output_bytes = output_bytes
        self._end_s = end_s

    async def run(self, episode: Episode, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Play an episode to its end. Returns when it is over and nothing of the program is left.

        Args:
            command: the program and its arguments. No shell reads it.
            environment: all of it.
            folder: the program's current one.
        """
        mark = self._processes.new_mark()
        try:
            with bounded_output(folder / OUTPUT, self._output_bytes) as output:
                process = _start(command, {**environment, reaper.VARIABLE: mark}, folder, output.descriptor)
                await self._wait(process, mark, episode)
        except (OSError, ValueError) as error:  # there is no such program or folder, or an argument has a NUL in it
            episode.end(RolloutStatus.ERROR_ENV, f"the agent could not be started: {summary(error)}")
            return
        if process.returncode == 0:
            episode.end()
        else:
            file = f" ({folder / OUTPUT})" if self._is_kept else ""
            episode.end(RolloutStatus.ERROR_ENV, _told(process.returncode, output.tail, file))

    async def _wait(self, process: subprocess.Popen[bytes], mark: str, episode: Episode) -> None:
        async with _end_of(process) as program:
            over = asyncio.ensure_future(episode.wait())
            try:
                await asyncio.wait((program, over), return_when=asyncio.FIRST_COMPLETED)
                if not program.done():
                    _signal_group(process, signal.SIGTERM)
                    await asyncio.wait((program,), timeout=self._end_s)
            finally:
                over.cancel()
                await _to_its_end(self._kill(process, program, mark))

    async def _kill(self, process: subprocess.Popen[bytes], program: asyncio.Future[None], mark: str) -> None:
        # The group's id is the process's own until that is waited for, and may be another's after that.
        _signal_group(process, signal.SIGKILL)
        await asyncio.wait((program,), timeout=_DEATH_S)
        process.poll()
        await self._processes.kill(mark)


def _start(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, output: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def make_folder(parent: Path, name: str) -> Path:
    """Make a new folder: `name`, or `name-2` if that exists."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


@asynccontextmanager
async def _end_of(process: subprocess.Popen[bytes]) -> AsyncGenerator[asyncio.Future[None]]:
    """Future that resolves when the process has ended, before it is reaped."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, lambda: ended.done() or ended.set_result(None))
    try:
        yield ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` before a cancellation takes effect."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _host(base_url: str) -> str:
    return re.sub(r"^\w+://|:\d+$|[\[\]]", "", base_url.rstrip("/"))


def _told(exit_code: int | None, tail: str, file: str) -> str:
    said = f"its output ends: {tail[-_TOLD:]}{file}" if tail else "it printed nothing"
    return f"the agent ended with exit code {exit_code}; {said}"
