"""What the agents of one process share: the server that they ask, and who ends their processes."""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import ConfigError, RequestError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.task import RunContext
from titan_rl.serving.access import Keys
from titan_rl.serving.app import PolicyApp, make_app
from titan_rl.serving.episode import EpisodeLimits
from titan_rl.serving.episode_store import EpisodeStore
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import seen_from_elsewhere, serve
from titan_rl.tasks.agents.processes import agent_processes
from titan_rl.tasks.agents.program import AgentProgram
from titan_rl.tasks.agents.settings import AgentSettings
from titan_rl.tasks.agents.waiting import WaitingSamples
from titan_rl.types import Completion

KEY_VARIABLE = "TITAN_RL_HARNESS_KEY"
"""The key with which harnesses open episodes; without it there is a new one each time."""

_ENOUGH = 1 << 20  # how many rollouts there are at once, and how long they take, the run says


@dataclass(frozen=True, slots=True)
class AgentHost:
    """
    Args:
        url: of the server.
        folder: holds a folder for each rollout.
        started_in: the current folder when the run began.
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
    """A server for the length of the block, and at its end no agent is left."""
    # Programs end with their episodes, and ask nothing later: what they said need not be kept for long.
    limits = EpisodeLimits(time_s=math.inf, episodes=_ENOUGH, keep_s=5.0 if settings.command else 60.0)
    store = EpisodeStore(run.renderer, limits)
    waiting = WaitingSamples()
    tokenizer = await in_thread(load_tokenizer, run.model)  # not the renderer's, which may be at work in another thread
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
