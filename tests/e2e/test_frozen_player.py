"""Frozen players: a checkpoint that plays a seat is served alongside the run. Engines are scripted."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from background import HANG_S

from titan_rl import SamplingParams, TokenPlayer
from titan_rl.core.console import LOG
from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.rollout.task import RunContext
from titan_rl.serving.client import HttpGenerateFn
from titan_rl.tasks.league import LeagueSeat
from titan_rl.tasks.players import FrozenPolicy, open_players
from titan_rl.tasks.policy_servers import open_opponents
from titan_rl.training.tiny_model import make_tiny_model

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

ROOT = Path(__file__).parents[2]

ENGINE = """
from titan_rl.generation.scripted_engine import ScriptedEngine

def make(spec):
    return ScriptedEngine(vocab_size=300, max_context=spec.max_context)
"""


async def test_frozen_player_serves_until_the_task_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    make_tiny_model(tmp_path / "model", texts=["pass or bet"], level="byte", parameters=150_000, max_context=64)
    settings = {"generation.engine": "own_engine:make", "generation.num_generators": "1"}
    frozen = FrozenPolicy(policy=str(tmp_path / "model"), settings=settings, temperature=0.5)
    run = RunContext("model", None, 48, tmp_path / "run", LOG)  # pyright: ignore[reportArgumentType]
    async with open_players({"first": "policy", "second": frozen, "third": frozen}, run) as players:
        assert players["first"] == "policy"
        player = players["second"]
        assert player is players["third"]
        assert isinstance(player, TokenPlayer)
        assert player.temperature == 0.5
        completion = await player.generate([1, 2, 3], request_id="g/0/second/0", sampling=SamplingParams(max_tokens=5))
        assert len(completion.token_ids) == 5
        generate = player.generate
        assert isinstance(generate, HttpGenerateFn)
        os.kill(server_of(tmp_path / "model"), signal.SIGKILL)
        assert len(await answer(player, "g/1/second/0")) == 5, "another server listens at the same address"
    (log,) = (tmp_path / "run" / "logs").glob("player-second-*.log")
    url = log.read_text().partition("OPENAI_BASE_URL=")[2].split()[0]
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/models")


async def test_one_server_plays_all_league_versions_and_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    make_tiny_model(tmp_path / "model", texts=["pass or bet"], level="byte", parameters=150_000, max_context=64)
    versions = tmp_path / "run" / "league"
    settings = LeagueSeat(league="hard", settings={"generation.engine": "own_engine:make"})
    run = RunContext(str(tmp_path / "model"), None, 48, tmp_path / "run", LOG)  # pyright: ignore[reportArgumentType]
    async with open_opponents(settings, run, versions) as opponents:
        shutil.copytree(tmp_path / "model", versions / "step-000010")  # frozen during the run

        async def play(version: int, number: int) -> int:
            """Number of weight loads before this answer."""
            generate = opponents.player(version).generate
            request_id = f"g/{number}/other/0"
            sampling = SamplingParams(max_tokens=5)
            completion = await generate([1, 2, 3], request_id=request_id, session_id="g/0", sampling=sampling)
            assert len(completion.token_ids) == 5
            return completion.version_spans[-1].version

        assert await play(0, 0) == 0, "the server begins with the initial model"
        assert await play(10, 1) == 1
        assert await play(10, 2) == 1, "the weights are loaded already"
        assert await play(0, 3) == 2
        with pytest.raises(RequestError, match="no model of this name"):
            await play(20, 4)
        os.kill(server_of(tmp_path / "model"), signal.SIGKILL)
        async with asyncio.timeout(HANG_S):
            assert await play(10, 5) == 1, "the request waits for another server"


def server_of(folder: Path) -> int:
    """Process id of `titan-rl serve` of a folder."""
    commands = {int(each.name): each / "cmdline" for each in Path("/proc").iterdir() if each.name.isdigit()}
    wanted = b"\0serve\0" + os.fsencode(folder) + b"\0"
    return next(pid for pid, command in commands.items() if wanted in command.read_bytes())


async def answer(player: TokenPlayer, request_id: str) -> Sequence[int]:
    """Tokens of a player, retrying until its server answers."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                sampling = SamplingParams(max_tokens=5)
                return (await player.generate([1, 2, 3], request_id=request_id, sampling=sampling)).token_ids
            except GenerationError:
                await asyncio.sleep(0.2)


async def test_unservable_player_error_includes_server_output(tmp_path: Path) -> None:
    run = RunContext("model", None, 48, tmp_path / "run", LOG)  # pyright: ignore[reportArgumentType]
    nothing = FrozenPolicy(policy=str(tmp_path / "nothing"))
    with pytest.raises(GenerationError, match=r"nothing ended: .*nothing"):
        async with open_players({"second": nothing}, run):
            pass
