"""Harness that plays the episodes of a run with the agent, many at once in one process.

    python -m examples.agent.harness runs/latest/agents-laptop-4711.json

Starting an interpreter with the agent's libraries takes longer than answering a question, so one process answers all
questions. It requests a sample from the run, plays it with the base URL and the key of the episode, and reports its
end. The file on the command line has the address and the key of the run, and only the user of the run may read it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
from agents import OpenAIChatCompletionsModel
from openai import AsyncOpenAI

from examples.agent.agent import answer

CONCURRENCY = 128
WAIT_S = 30.0


async def play_all(http: httpx.AsyncClient, openai: AsyncOpenAI) -> None:
    """Play one episode after another, until the run ends."""
    while True:
        try:
            opened = await http.post("/episodes", json={"wait_s": WAIT_S})
            if opened.status_code == 503:
                return
            if opened.is_success:
                await play(http, openai, opened.json())
        except httpx.TransportError:
            return


async def play(http: httpx.AsyncClient, openai: AsyncOpenAI, episode: dict[str, Any]) -> None:
    url, key, sample = episode["base_url"], episode["key"], episode["sample"]
    model = OpenAIChatCompletionsModel("policy", openai.with_options(base_url=f"{url}/v1", api_key=key))
    try:
        await answer(model, sample["seed"], sample["question"])
        end = {"status": "completed"}
    except Exception as error:
        end = {"status": "error_env", "error": f"{type(error).__name__}: {error}"[:1000]}
    await http.post(f"{url}/end", json=end, headers={"authorization": f"Bearer {key}"})


async def main(run: dict[str, str]) -> None:
    headers = {"authorization": f"Bearer {run['key']}"}
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with (
        httpx.AsyncClient(base_url=run["url"], headers=headers, timeout=2 * WAIT_S, limits=limits) as http,
        AsyncOpenAI(base_url=run["url"], api_key="of each episode", max_retries=0) as openai,
        asyncio.TaskGroup() as episodes,
    ):
        for _ in range(CONCURRENCY):
            episodes.create_task(play_all(http, openai))


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
