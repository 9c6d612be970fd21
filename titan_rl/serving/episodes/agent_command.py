"""An agent that is a program: started for one episode, and killed with all its children when that is over."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan_rl.calls.user_code import summary
from titan_rl.rollout.types import RolloutStatus
from titan_rl.serving.episodes.episode import Episode

MARK = "TITAN_RL_AGENT"
"""The variable by which the processes of an agent are known, whatever session or parent they have moved to."""

_TOLD = 2_000  # characters of an agent's output that an error tells
_PASSES = 200


def agent_environment(base_url: str, key: str) -> dict[str, str]:
    """What leads the clients of OpenAI and Anthropic to an episode.

    Args:
        base_url: of the server: "http://127.0.0.1:8000".
    """
    base_url = base_url.rstrip("/")
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
    }


class AgentCommand:
    """Runs a program for each episode, in a folder of its own, until it or the episode ends.

        the program ends with exit code 0       COMPLETED
        with another, or cannot be started      ERROR_ENV, with the end of its output
        the episode ends first                  as it says; the program is told (SIGTERM) and has `end_s` seconds

    In all of them, and when cancelled, whatever it has started is killed: processes are known by a variable of their
    environment, which they keep when they leave their session or outlive their parent. One that clears its environment
    is killed if it has stayed in the program's process group.

    Args:
        command: the program and its arguments. No shell reads it.
        folder: holds a folder for each episode, with `output.txt` in it: what the program prints.
        environment: of the program, beside the episode's. None is that of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        end_s: float = 5.0,
    ) -> None:
        self._command = list(command)
        self._folder = folder
        self._environment = environment
        self._end_s = end_s

    async def run(self, episode: Episode, base_url: str) -> None:
        """Play an episode to its end. Returns when it is over and nothing of the program is left."""
        folder = self._folder / episode.id.replace("/", "_")
        mark = secrets.token_hex(16)
        process: asyncio.subprocess.Process | None = None
        try:
            folder.mkdir(parents=True)
            with (folder / "output.txt").open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    cwd=folder,
                    env=self._environment_of(episode, base_url) | {MARK: mark},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            await self._wait(process, episode)
        except (OSError, ValueError) as error:  # there is no such program or folder, or a name has a NUL in it
            episode.end(RolloutStatus.ERROR_ENV, f"the agent could not be started: {summary(error)}")
        finally:
            _kill_all(mark, None if process is None else process.pid)
            if process is not None:
                await process.wait()
        if process is not None and episode.status is None:
            if process.returncode == 0:
                episode.end()
            else:
                episode.end(RolloutStatus.ERROR_ENV, _told(process.returncode, folder / "output.txt"))

    async def _wait(self, process: asyncio.subprocess.Process, episode: Episode) -> None:
        program = asyncio.ensure_future(process.wait())
        over = asyncio.ensure_future(episode.wait())
        try:
            await asyncio.wait((program, over), return_when=asyncio.FIRST_COMPLETED)
            if not program.done():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                await asyncio.wait((program,), timeout=self._end_s)
        finally:
            program.cancel()
            over.cancel()

    def _environment_of(self, episode: Episode, base_url: str) -> dict[str, str]:
        given = os.environ if self._environment is None else self._environment
        return {**given, **agent_environment(base_url, episode.key)}


def _kill_all(mark: str, group: int | None) -> None:
    """Kill until there is none: one may fork while others are killed."""
    for _ in range(_PASSES):
        if group is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        if not (found := _marked(mark)):
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """Processes that live and have the mark."""
    needle = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError), open(f"/proc/{entry.name}/environ", "rb") as environment:  # another user's, or gone
                if needle in environment.read().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _told(exit_code: int | None, output: Path) -> str:
    try:
        with output.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TOLD))
            text = file.read().decode("utf-8", "replace").strip()
    except OSError as error:  # the agent may do with its folder what it likes
        return f"the agent ended with exit code {exit_code}; its output cannot be read: {summary(error)}"
    return f"the agent ended with exit code {exit_code}; its output ends: {text}" if text else (
        f"the agent ended with exit code {exit_code} and printed nothing"
    )  # fmt: skip
