"""Frozen versions of a run as players, on one server that holds the weights of one version at a time."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.core.calls.retries import Backoff
from titan_rl.core.errors import GenerationError
from titan_rl.rollout.environment.types import TokenPlayer
from titan_rl.rollout.task import RunContext
from titan_rl.tasks.league import LeagueSeat, version_name
from titan_rl.types import Completion, GenerateFn, SamplingParams

if TYPE_CHECKING:
    from titan_rl.tasks.served import Served

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


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
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                return await self._generate(
                    prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling
                )
            except GenerationError as error:
                logger.warning("%s: %s; it is asked again in %g s", self._name, error, backoff.next_s)
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
    from titan_rl.tasks.agents.program import agent_processes
    from titan_rl.tasks.served import serving

    versions.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  it returns at once
    log = run.folder / "logs" / f"league-{socket.gethostname()}-{os.getpid()}.log"
    run.tell(f"versions of this run play, and are being served; log: {log}")
    async with AsyncExitStack() as resources:
        processes = await resources.enter_async_context(agent_processes())
        starting = serving(
            run.model,
            processes,
            log,
            max_context=run.max_context,
            settings={
                "generation.num_generators": "1",
                "server.versions": str(versions),
                **settings.settings,
            },
            start_s=settings.start_s,
            timeout_s=settings.timeout_s,
        )
        served = await resources.enter_async_context(starting)
        yield Opponents(served, settings, resources)
