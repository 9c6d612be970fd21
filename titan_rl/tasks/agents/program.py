"""Agent programs: started with a mark, run for one episode with bounded output, and killed with all their children."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import summary
from titan_rl.rollout.types import RolloutStatus
from titan_rl.serving.episode import Episode
from titan_rl.serving.episode_store import episode_url
from titan_rl.tasks.agents import reaper

_DEATH_S = 5.0  # longest wait for the end of a killed process


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """Program that has been started.

    Attributes:
        process: The process.
        ended: Future that is done when the process has ended, before it is reaped.
    """

    process: subprocess.Popen[bytes]
    ended: asyncio.Future[None]


class AgentProcesses:
    """Agent processes of this process. Each agent has a mark in its environment, by which it is found and killed with
    all its children. Made by `agent_processes`."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._numbers = count()
        self._doomed: dict[str, asyncio.Future[None]] = {}  # programs to kill, by mark; done once they are killed
        self._killing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(
        self, command: Sequence[str], environment: Mapping[str, str], output: int, folder: Path | None = None
    ) -> AsyncGenerator[RunningProgram]:
        """Context in which a program runs. At its end the program is killed with all its children, even if the caller
        is cancelled during that.

        Args:
            command: Program and its arguments.
            environment: All environment variables of the program, except for the mark.
            output: File descriptor for the program's output and errors.
            folder: Current folder of the program.

        Raises:
            OSError, ValueError: the program cannot be started.
        """
        mark = f"{self._owner}.{next(self._numbers)}"
        process = subprocess.Popen(  # noqa: ASYNC220  it returns at once
            command,
            cwd=folder,
            env={**environment, reaper.VARIABLE: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal does not reach it
        )
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        descriptor = os.pidfd_open(process.pid)
        loop.add_reader(descriptor, lambda: ended.done() or ended.set_result(None))
        try:
            yield RunningProgram(process, ended)
        finally:
            killing, cancelled = asyncio.ensure_future(self._kill_program(process, ended, mark)), None
            while not killing.done():
                try:
                    await asyncio.wait((killing,))
                except asyncio.CancelledError as error:
                    cancelled = error
            loop.remove_reader(descriptor)
            os.close(descriptor)
            if cancelled is not None:
                raise cancelled
            killing.result()

    async def close(self) -> None:
        if self._killing is not None:
            await self._killing
        await in_thread(reaper.kill_marked, self._owner)

    async def _kill_program(self, process: subprocess.Popen[bytes], ended: asyncio.Future[None], mark: str) -> None:
        if process.returncode is None:  # once a process is reaped, another group may have its id
            signal_group(process, signal.SIGKILL)
        await asyncio.wait((ended,), timeout=_DEATH_S)
        process.poll()
        killed = self._doomed[mark] = asyncio.get_running_loop().create_future()
        if self._killing is None:
            self._killing = asyncio.create_task(self._kill_doomed())
        await killed

    async def _kill_doomed(self) -> None:
        """Kill the processes of all requested marks in one scan of `/proc`, since a scan takes a while."""
        try:
            while doomed := self._doomed:
                self._doomed = {}
                try:
                    await in_thread(reaper.kill_marked, self._owner, set(doomed))
                except Exception as error:
                    for killed in doomed.values():
                        killed.set_exception(error)
                else:
                    for killed in doomed.values():
                        killed.set_result(None)
        finally:
            self._killing = None


@asynccontextmanager
async def agent_processes() -> AsyncGenerator[AgentProcesses]:
    """Context of agent processes. None of them is left afterwards, even if this process is killed."""
    owner = secrets.token_hex(16)
    # The watching process kills the agents once the current process has ended.
    watching = subprocess.Popen(  # noqa: ASYNC220  it returns at once
        [sys.executable, "-I", "-S", reaper.__file__, owner],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal does not reach it
    )
    processes = AgentProcesses(owner)
    try:
        yield processes
    finally:
        try:
            await asyncio.shield(processes.close())
        finally:
            watching.kill()
            watching.communicate()


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and the children in its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


TAIL_BYTES = 4096
_READ_BYTES = 65536


class BoundedOutput:
    """Pipe into a file that keeps the first and the last bytes.

    Args:
        path: Path of the file.
        limit: Number of bytes kept from the beginning; of the rest, the last `TAIL_BYTES` are kept.

    Attributes:
        descriptor: File descriptor of the pipe's writing end.
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


_SHOWN = 2_000  # characters of an agent's output in an error
OUTPUT = "output.txt"


def agent_environment(base_url: str, episode: Episode) -> dict[str, str]:
    """Environment variables that connect OpenAI and Anthropic clients to an episode, with the URL for its rewards.

    Args:
        base_url: URL of the server, such as "http://127.0.0.1:8000".
        episode: The episode.
    """
    url = episode_url(base_url, episode)
    no_proxy = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), _host(base_url))))
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": episode.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": episode.key,
        "ANTHROPIC_AUTH_TOKEN": "",  # the user may have set one, and clients warn about two
        "TITAN_RL_EPISODE_URL": url,
        "TITAN_RL_EPISODE_KEY": episode.key,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


class AgentProgram:
    """Runs a program for an episode until the program or the episode ends.

        the program ends with exit code 0       COMPLETED
        another exit code, or it cannot start   ERROR_ENV, with the end of its output
        the episode ends first                  the episode's status; the program gets SIGTERM and has `end_s` seconds

    In all cases, and on cancellation, all child processes of the program are killed.

    Args:
        processes: Agent processes of this process.
        output_bytes: Largest number of bytes of output kept in `output.txt` of the program's folder.
        end_s: Seconds that a program has to end after SIGTERM.
        is_kept: Whether an error names the file with the output.
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
            episode: The episode.
            command: Program and its arguments, which are not interpreted by a shell.
            environment: All environment variables of the program.
            folder: Current folder of the program.
        """
        over = asyncio.ensure_future(episode.wait())
        try:
            with closing(BoundedOutput(folder / OUTPUT, self._output_bytes)) as output:
                async with self._processes.running(command, environment, output.descriptor, folder) as running:
                    await asyncio.wait((running.ended, over), return_when=asyncio.FIRST_COMPLETED)
                    if not running.ended.done():
                        signal_group(running.process, signal.SIGTERM)
                        await asyncio.wait((running.ended,), timeout=self._end_s)
        except (OSError, ValueError) as error:  # there is no such program or folder, or an argument contains a NUL
            episode.end(RolloutStatus.ERROR_ENV, f"the agent could not be started: {summary(error)}")
            return
        finally:
            over.cancel()
        exit_code = running.process.returncode
        if exit_code == 0:
            episode.end()
            return
        file = f" ({folder / OUTPUT})" if self._is_kept else ""
        output_text = f"its output ends: {output.tail[-_SHOWN:]}{file}" if output.tail else "it printed nothing"
        episode.end(RolloutStatus.ERROR_ENV, f"the agent ended with exit code {exit_code}; {output_text}")


def make_folder(parent: Path, name: str) -> Path:
    """Make a new folder: `name`, or `name-2` if that exists, and so on."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("there is always another number")


def _host(base_url: str) -> str:
    return re.sub(r"^\w+://|:\d+$|[\[\]]", "", base_url.rstrip("/"))
