"""Host of the agents of one process: the policy server, and the samples that wait for external harnesses."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import socket
from collections import deque
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import BusyError, ConfigError, RequestError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.task import RunContext
from titan_rl.serving.access import Keys
from titan_rl.serving.app import PolicyApp, make_app
from titan_rl.serving.episode import Episode, EpisodeLimits
from titan_rl.serving.episode_store import EpisodeStore, Opened
from titan_rl.serving.http.errors import ApiError
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import seen_from_elsewhere, serve
from titan_rl.tasks.agents.processes import agent_processes
from titan_rl.tasks.agents.program import AgentProgram
from titan_rl.tasks.agents.settings import AgentSettings
from titan_rl.types import Completion


class WaitingSamples:
    """Queue of samples for external harnesses."""

    def __init__(self) -> None:
        self._offers: deque[tuple[Opened, asyncio.Event]] = deque()
        self._more = asyncio.Condition()
        self._closed = False

    @contextmanager
    def offered(self, episode: Episode, sample: Any) -> Generator[asyncio.Event]:
        """Offer a sample during the block. The event is set once a harness has taken it."""
        offer = Opened(episode, sample), asyncio.Event()
        self._offers.append(offer)
        waking = asyncio.ensure_future(self._wake())
        try:
            yield offer[1]
        finally:
            waking.cancel()
            if offer in self._offers:
                self._offers.remove(offer)

    async def take(self, wait_s: float) -> Opened:
        """Take the sample that has waited longest.

        Args:
            wait_s: longest wait for a sample.

        Raises:
            BusyError: no sample is waiting.
            ApiError: 503, the run is over.
        """
        async with self._more:
            try:
                async with asyncio.timeout(wait_s):
                    await self._more.wait_for(lambda: bool(self._offers) or self._closed)
            except TimeoutError:
                if not self._offers:
                    raise BusyError("no sample waits for a harness; ask again, or with a longer wait_s") from None
        if self._closed:
            raise ApiError(503, "the run is over", code="run_over")
        opened, taken = self._offers.popleft()
        taken.set()
        return opened

    async def close(self) -> None:
        """End the run for waiting and later harnesses."""
        self._closed = True
        async with self._more:
            self._more.notify_all()

    async def _wake(self) -> None:
        async with self._more:
            self._more.notify()


KEY_VARIABLE = "TITAN_RL_HARNESS_KEY"
"""Environment variable with the key for opening episodes; without it each run makes a new key."""

_ENOUGH = 1 << 20  # the run itself limits the number and time of rollouts


@dataclass(frozen=True, slots=True)
class AgentHost:
    """Shared resources of the agents of one process.

    Args:
        url: URL of the policy server.
        folder: has a folder for each rollout.
        started_in: the current folder at the start of the run.
    """

    settings: AgentSettings
    url: str
    folder: Path
    started_in: Path
    store: EpisodeStore
    program: AgentProgram
    waiting: WaitingSamples


@asynccontextmanager
async def hosting(settings: AgentSettings, run: RunContext) -> AsyncGenerator[AgentHost]:
    """Serve the policy for the length of the block. At its end no agent process is left."""
    # Programs end with their episodes and send no later requests, so episodes need not be kept for long.
    limits = EpisodeLimits(time_s=math.inf, episodes=_ENOUGH, keep_s=5.0 if settings.command else 60.0)
    store = EpisodeStore(run.renderer, limits)
    waiting = WaitingSamples()
    tokenizer = await in_thread(load_tokenizer, run.model)  # not the renderer's, which another thread may be using
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    app = make_app(
        _nobody,
        model="policy",
        any_model=True,
        max_context=run.max_context,
        tokenizer=tokenizer,
        renderer=run.renderer,
        keys=Keys([key]),
        limits=ServerLimits(num_places=_ENOUGH, request_s=math.inf),
        episodes=store,
        open_episode=None if settings.command else waiting.take,
    )
    async with agent_processes() as processes, _served(app, settings) as url:
        program = AgentProgram(
            processes, output_bytes=settings.output_bytes, end_s=settings.end_s, is_kept=settings.keep != "none"
        )
        if settings.command:
            run.tell(f"agents ask the policy at {seen_from_elsewhere(url)}")
            yield AgentHost(settings, url, run.folder / "agents", Path.cwd(), store, program, waiting)
            return
        address = run.folder / f"agents-{socket.gethostname()}-{os.getpid()}.json"
        address.touch(0o600)
        address.write_text(json.dumps({"url": seen_from_elsewhere(url), "key": key}), encoding="utf-8")
        run.tell(f"harnesses open episodes at {seen_from_elsewhere(url)}/episodes, with the key in {address}")
        try:
            yield AgentHost(settings, url, run.folder / "agents", Path.cwd(), store, program, waiting)
        finally:
            address.unlink(missing_ok=True)
            await waiting.close()


@asynccontextmanager
async def _served(app: PolicyApp, settings: AgentSettings) -> AsyncGenerator[str]:
    async with AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(serve(app, host=settings.host, port=settings.port))
        except ConfigError as error:
            if not settings.port:
                raise
            raise ConfigError(
                f"task.port = {settings.port}: {error}. Each rollout worker has a server of its own: with several "
                "(rollout.num_workers) leave task.port at 0, and each takes one that is free"
            ) from error
        yield url


async def _nobody(request: EngineRequest, on_chunk: OnChunk) -> Completion:
    raise RequestError("this key opens episodes; ask the policy with the key of one")
