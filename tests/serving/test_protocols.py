"""Behaviour shared by all message protocols."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from byte_model import qwen3
from clients import ANSWERS, TOKENIZER, chat_server
from served import client_of, until

from titan_rl.serving.server import serve

SYSTEM = "be brief"


@dataclass(frozen=True)
class Protocol:
    """Requests of a protocol, and the text in its answers."""

    path: str
    body: Callable[[list[dict[str, Any]]], dict[str, Any]]
    text: Callable[[Any], str]
    delta: Callable[[Any], str]

    def asked(self, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self.body(messages), "return_token_ids": True, **more}


def token_ids(answer: Any) -> list[int]:
    """Return the tokens of prompt and completion."""
    return [*answer["prompt_token_ids"], *(answer.get("choices") or [answer])[0]["token_ids"]]


PROTOCOLS = {
    "chat": Protocol(
        "/v1/chat/completions",
        lambda messages: {"messages": [{"role": "system", "content": SYSTEM}, *messages]},
        lambda answer: answer["choices"][0]["message"]["content"],
        lambda event: event["choices"][0]["delta"].get("content") or "",
    ),
    "responses": Protocol(
        "/v1/responses",
        lambda messages: {"instructions": SYSTEM, "input": messages},
        lambda answer: answer["output"][-1]["content"][0]["text"],
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "messages": Protocol(
        "/v1/messages",
        lambda messages: {"system": SYSTEM, "messages": messages, "max_tokens": 100},
        lambda answer: answer["content"][-1]["text"],
        lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else "",
    ),
}
each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=list(PROTOCOLS))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def streamed(client: httpx.AsyncClient, protocol: Protocol, said: str) -> str:
    text = ""
    async with client.stream("POST", protocol.path, json=protocol.asked([user(said)], stream=True)) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += protocol.delta(json.loads(line.removeprefix("data: ")))
    return text


async def test_conversation_continues_across_protocols() -> None:
    async with chat_server(qwen3(TOKENIZER)) as stage, client_of(stage.app) as client:
        messages = [user("sky")]
        so_far: list[int] = []
        for protocol in (*PROTOCOLS.values(), *PROTOCOLS.values()):
            answer = (await client.post(protocol.path, json=protocol.asked(messages))).json()
            assert answer["prompt_token_ids"][: len(so_far)] == so_far
            so_far = token_ids(answer)
            messages = [*messages, {"role": "assistant", "content": protocol.text(answer)}, user("sky")]
        assert TOKENIZER.decode(so_far).count("blue<|im_end|>") == 6


@each_protocol
async def test_stream_survives_a_pause_a_pull_and_a_lost_engine(protocol: Protocol) -> None:
    async with (
        chat_server(engine={"block_at_step": 5}) as stage,
        serve(stage.app) as url,
        httpx.AsyncClient(base_url=url, timeout=150) as client,
    ):
        asked = asyncio.create_task(streamed(client, protocol, "hi"))
        await until(lambda: any(engine.started.is_set() for engine in stage.engines.engines))
        hit = next(at for at, engine in enumerate(stage.engines.engines) if engine.started.is_set())
        pausing = asyncio.create_task(stage.router.pause("keep"))
        await until(lambda: stage.router.paused == "keep")
        for engine in stage.engines.engines:
            engine.release.set()
        await pausing
        await stage.router.pull_state_dict(1)
        await stage.router.resume()
        stage.router.remove_replica(f"engine-{hit}")
        assert await asked == ANSWERS["hi"]


@each_protocol
async def test_disconnected_client_frees_its_slot(protocol: Protocol) -> None:
    async with (
        chat_server(engine={"block_at_step": 5}) as stage,
        serve(stage.app) as url,
        httpx.AsyncClient(base_url=url, timeout=150) as client,
    ):
        asked = asyncio.create_task(streamed(client, protocol, "hi"))
        await until(lambda: any(engine.started.is_set() for engine in stage.engines.engines))
        asked.cancel()
        await until(lambda: stage.app.exchanges.num_completions_running == 0)
        for engine in stage.engines.engines:
            engine.release.set()
        await until(lambda: not any(replica.num_requests for replica in stage.router.replicas))
