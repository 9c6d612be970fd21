"""Players that are open as long as a task is."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from titan_rl.core.calls.imports import find_function
from titan_rl.rollout.environment.seats import MessagePlayer, Player, TokenPlayer
from titan_rl.rollout.task import RunContext
from titan_rl.tasks.agents.processes import agent_processes
from titan_rl.tasks.players.endpoint import EndpointPlayer
from titan_rl.tasks.players.frozen import serving
from titan_rl.tasks.players.settings import Endpoint, FrozenPolicy, PlayerSetting


@asynccontextmanager
async def open_players(settings: Mapping[str, PlayerSetting], run: RunContext) -> AsyncGenerator[dict[str, Player]]:
    """Who plays each seat, for the length of the block. A checkpoint that plays several seats is served once.

    Raises:
        ConfigError: a script is not there.
        GenerationError: a checkpoint cannot be served.
    """
    async with AsyncExitStack() as stack:
        served: list[tuple[FrozenPolicy, Player]] = []
        players: dict[str, Player] = {}
        for seat, setting in settings.items():
            known: Player | None = next((player for of, player in served if of == setting), None)
            if known is not None:
                players[seat] = known
                continue
            players[seat] = await _open(seat, setting, run, stack)
            if isinstance(setting, FrozenPolicy):
                served.append((setting, players[seat]))
        yield players


async def _open(seat: str, setting: PlayerSetting, run: RunContext, stack: AsyncExitStack) -> Player:
    if isinstance(setting, Endpoint):
        endpoint = EndpointPlayer(setting)
        stack.push_async_callback(endpoint.close)
        return MessagePlayer(endpoint.reply, timeout_s=setting.timeout_s)
    if isinstance(setting, FrozenPolicy):
        log = run.folder / "logs" / f"player-{seat}-{socket.gethostname()}-{os.getpid()}.log"
        run.tell(f"seat {seat!r} is played by {setting.policy}, which is being served; log: {log}")
        processes = await stack.enter_async_context(agent_processes())
        generate = await stack.enter_async_context(serving(setting, processes, log, max_context=run.max_context))
        return TokenPlayer(generate, temperature=setting.temperature, timeout_s=setting.timeout_s)
    return "policy" if setting == "policy" else MessagePlayer(find_function(f"task.seats.{seat}", setting, {}))
