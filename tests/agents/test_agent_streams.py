"""Streamed completions of an agent in training, and stop strings that end them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from serving.served import Engines
from test_agent_task import addresses, stage, trained

from titan_rl.rollout.types import Rollout, RolloutStatus

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "b a"}], "return_token_ids": True}


@asynccontextmanager
async def episode(folder: Path, engines: Engines, finished: list[Rollout]) -> AsyncIterator[httpx.AsyncClient]:
    """Client of an agent whose episode lasts for the block. Its rollout is then added to `finished`."""
    async with stage(folder, command=(), engines=engines) as it:
        running = asyncio.create_task(it.group(size=1))
        server = json.loads(addresses(folder)[0].read_text())
        async with httpx.AsyncClient(timeout=300) as client:
            headers = {"authorization": f"Bearer {server['key']}"}
            opened = (await client.post(f"{server['url']}/episodes", json={"wait_s": 60}, headers=headers)).json()
        own = {"x-api-key": opened["key"]}
        async with httpx.AsyncClient(base_url=opened["base_url"], headers=own, timeout=300) as agent:
            yield agent
            await agent.post("/reward", json={"rewards": {"reward": 1.0}})
            await agent.post("/end", json={})
        finished += (await running).rollouts
    assert finished[0].status is RolloutStatus.COMPLETED


async def test_stream_delivers_tokens_as_they_are_sampled(tmp_path: Path) -> None:
    engines, finished, received = Engines(1, vocab_size=400, block_at_step=6), list[Rollout](), list[int]()
    async with (
        episode(tmp_path, engines, finished) as agent,
        agent.stream("POST", CHAT, json={**ASKED, "stream": True}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                received += [t for choice in json.loads(line[6:])["choices"] for t in choice.get("token_ids", ())]
                if len(received) == 5:  # the engine is blocked in its sixth step
                    engines.engines[0].release.set()
    assert len(received) == 16
    assert trained(finished[0]) == [received]


async def test_stop_string_ends_generation_early(tmp_path: Path) -> None:
    engines, finished = Engines(1, vocab_size=400, block_at_step=16 + 10), list[Rollout]()
    async with episode(tmp_path, engines, finished) as agent:
        logprobs = {**ASKED, "logprobs": True}
        (whole,) = (await agent.post(CHAT, json=logprobs)).json()["choices"]
        pieces = [one["token"] for one in whole["logprobs"]["content"]]
        at = next(at for at in range(3, 8) if pieces[at].strip() and "\ufffd" not in pieces[at])
        # The same context gets the same tokens, and the engine is blocked at the tenth.
        (cut,) = (await agent.post(CHAT, json={**ASKED, "stop": pieces[at]})).json()["choices"]
        engines.engines[0].release.set()
    assert cut["finish_reason"] == "stop"
    assert len(cut["token_ids"]) < 10
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert sorted(trained(finished[0])) == sorted([whole["token_ids"], cut["token_ids"]])
