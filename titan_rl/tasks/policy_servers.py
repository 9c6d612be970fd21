"""Policies served alongside a run, by processes of `titan-rl serve` that are restarted if they die: a checkpoint or
model, and the frozen versions of a run, which share one server that holds the weights of one version at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.core.calls.retries import Backoff
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.console import Console
from titan_rl.core.errors import GenerationError, ModelError
from titan_rl.core.model_identity import changed_parts, model_identity, recorded_identity
from titan_rl.rollout.environment.types import TokenPlayer
from titan_rl.rollout.task import RunContext
from titan_rl.tasks.league import LeagueSeat, version_name
from titan_rl.types import Completion, GenerateFn, SamplingParams

if TYPE_CHECKING:
    from titan_rl.tasks.agents.program import AgentProcesses

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_END_S = 10.0  # time for a server to shut down
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # pauses before restarts
_URL = re.compile(r"OPENAI_BASE_URL=(\S+?:(\d+))/v1\b")


@dataclass(frozen=True, slots=True)
class Served:
    """Address of a server, and the key that it requires."""

    url: str
    api_key: str


@dataclass(eq=False)
class PolicyServer:
    """Process of `titan-rl serve`. If it ends, another one is started at the same address, unless the folder now has
    another model.

    Args:
        folder: Folder of a run, a checkpoint, an export or a model.
        processes: Runs and kills the process.
        log: File for the output.
        options: Settings of the server.
        start_s: Longest time until the server listens.
        run: Folder of the run for which the policy is served.
        console: Shows that the folder has another model.
    """

    folder: str
    processes: AgentProcesses
    log: Path
    options: Mapping[str, str]
    start_s: float
    run: Path
    console: Console

    def __post_init__(self) -> None:
        self._model: Mapping[str, str] | None = None  # identity of the model that is served
        self._environment = {**os.environ, "TITAN_RL_API_KEY": secrets.token_urlsafe(32)}
        self._port = "0"  # the system chooses the port of the first process
        self.served: asyncio.Future[Served] = asyncio.get_running_loop().create_future()

    async def keep(self) -> None:
        """Run the server until this call is cancelled. `served` has its address, or the error of the first start."""
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                await in_thread(self._check_model)
                await self._run()
                error = self._failure("ended")
            except ModelError as changed:
                error = changed
                self.console.warning(str(changed))
            except (GenerationError, OSError) as failed:
                error = failed
            if not self.served.done():
                self.served.set_exception(error)
                return
            logger.warning("%s; it is restarted in %g s", error, backoff.next_s)
            await backoff.pause()

    def _check_model(self) -> None:
        """Check that the folder has the model with which the run began.

        Raises:
            ModelError: It has another one.
        """
        folder = Path(self.folder)
        if self._model is None:
            self._model = recorded_identity(folder, self.run) or model_identity(folder)
        if changed := changed_parts(folder, self._model):
            raise ModelError(
                f"{folder} is not served: {', '.join(changed)} changed since the run began; put that model back"
            )

    async def _run(self) -> None:
        """Run one process until it ends.

        Raises:
            GenerationError: the process ended before it listened, or did not listen in time. The message has the end of
                its output.
        """
        command = [sys.executable, "-m", "titan_rl.cli.main", "serve", self.folder]
        for name, value in {**self.options, "server.port": self._port}.items():
            command += [f"--{name}", value]
        with self.log.open("wb") as output:
            async with self.processes.running(command, self._environment, output.fileno()) as server:
                try:
                    url, self._port = await self._address(server.process)
                    if not self.served.done():
                        self.served.set_result(Served(url, self._environment["TITAN_RL_API_KEY"]))
                    await server.ended
                finally:
                    with suppress(ProcessLookupError):
                        server.process.send_signal(signal.SIGTERM)
                    await asyncio.shield(asyncio.wait((server.ended,), timeout=_END_S))

    async def _address(self, process: subprocess.Popen[bytes]) -> tuple[str, str]:
        """URL and port of the server, which it prints once it listens."""
        try:
            async with asyncio.timeout(self.start_s):
                while (found := _URL.search(self._printed())) is None:
                    if process.poll() is not None:
                        raise self._failure("ended")
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise self._failure(f"did not answer within start_s = {self.start_s:g} s") from None
        return found[1], found[2]

    def _failure(self, problem: str) -> GenerationError:
        return GenerationError(f"the server of {self.folder} {problem}: {self._printed()[-500:]} ({self.log})")

    def _printed(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def new_log(folder: Path, name: str) -> Path:
    """Create the file for a server's output: `NAME.log`, or `NAME-2.log` and so on if another server has it. A server
    reads its address from its file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        log = folder / (f"{name}.log" if number == 1 else f"{name}-{number}.log")
        with suppress(FileExistsError):
            log.touch(exist_ok=False)
            return log
    raise AssertionError("there is always another number")


@asynccontextmanager
async def serving(
    folder: str,
    log: Path,
    *,
    max_context: int,
    settings: Mapping[str, str],
    start_s: float,
    timeout_s: float,
    run: Path,
    console: Console,
) -> AsyncGenerator[Served]:
    """Context in which the policy of a folder is served. If the server dies it is restarted; requests fail until then.

    Args:
        folder: Folder of a run, a checkpoint, an export or a model.
        log: File for the server's output, which no other server has; see `new_log`.
        max_context: Largest number of tokens of prompt and completion together.
        settings: Further settings of the server.
        start_s: Longest time until the server listens.
        timeout_s: Time limit of one answer.
        run: Folder of the run.
        console: Shows that the folder has another model than before, so that the server is not restarted.

    Raises:
        ModelError: the folder has another model than at the beginning of the run.
        GenerationError: the server ended while it started, or did not listen in time. The message has the end of its
            output.
    """
    from titan_rl.tasks.agents.program import agent_processes  # here, because only servers and agents need it

    options = {"server.request_s": f"{timeout_s}", "model.max_context": str(max_context), **settings}
    async with agent_processes() as processes:
        server = PolicyServer(folder, processes, log, options, start_s, run, console)
        keeping = asyncio.ensure_future(server.keep())
        try:
            await asyncio.wait((keeping, server.served), return_when=asyncio.FIRST_COMPLETED)
            if not server.served.done():
                keeping.result()  # raises the error
            yield await server.served
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))


_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0  # pauses before a request is repeated


class PersistentGenerate:
    """`GenerateFn` that repeats a request while a server fails, for instance until it is restarted. The caller limits
    the time. A request that the server refuses fails at once.

    Raises:
        RequestError: the server refuses the request.
    """

    def __init__(self, generate: GenerateFn, name: str) -> None:
        self._generate = generate
        self._name = name

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while True:
            try:
                return await self._generate(
                    prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling
                )
            except GenerationError as error:
                logger.warning("%s: %s; retrying in %g s", self._name, error, backoff.next_s)
            await backoff.pause()


class Opponents:
    """Players by version, which share one server. Made by `open_opponents`.

    Args:
        served: Server of the versions.
        settings: Settings of the league.
        resources: Closes the connections of the players.
    """

    def __init__(self, served: Served, settings: LeagueSeat, resources: AsyncExitStack) -> None:
        self._served = served
        self._settings = settings
        self._resources = resources
        self._players: dict[int, TokenPlayer] = {}

    def player(self, version: int) -> TokenPlayer:
        """Player of a version. The version's folder must exist when the player is asked."""
        if version not in self._players:
            from titan_rl.serving.client import HttpGenerateFn

            name, settings = version_name(version), self._settings
            model = name if version else None  # version 0 is the model with which the server was started
            generate = HttpGenerateFn(
                self._served.url, model=model, api_key=self._served.api_key, timeout_s=settings.timeout_s
            )
            self._resources.push_async_callback(generate.close)
            player = TokenPlayer(
                PersistentGenerate(generate, name), temperature=settings.temperature, timeout_s=settings.timeout_s
            )
            self._players[version] = player
        return self._players[version]


@asynccontextmanager
async def open_opponents(settings: LeagueSeat, run: RunContext, versions: Path) -> AsyncGenerator[Opponents]:
    """Context in which the frozen versions of a run are served. If the server dies it is restarted, and requests wait
    until then.

    Args:
        settings: Settings of the league.
        run: The run.
        versions: Folder with a Hugging Face folder for each version.

    Raises:
        GenerationError: the server cannot be started.
    """
    versions.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  it returns at once
    log = new_log(run.folder / "logs", f"league-{socket.gethostname()}-{os.getpid()}")
    run.tell(f"versions of this run play, and are being served; log: {log}")
    starting = serving(
        run.model,
        log,
        max_context=run.max_context,
        settings={"generation.num_generators": "1", "server.versions": str(versions), **settings.settings},
        start_s=settings.start_s,
        timeout_s=settings.timeout_s,
        run=run.folder,
        console=run.console,
    )
    async with AsyncExitStack() as resources:
        yield Opponents(await resources.enter_async_context(starting), settings, resources)
