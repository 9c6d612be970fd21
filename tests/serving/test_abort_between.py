"""Abort in the middle of a completion: the client sees one uninterrupted answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from clients import chat_server
from served import Served, client_of, until

CHAT = "/v1/chat/completions"


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("budget", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
async def test_aborted_and_resumed_completion_reads_as_one(budget: str, stream: bool) -> None:
    """After an abort, the completion continues with the rest of its budget. Tokens, logprobs and usage of the parts add
    up, id and role are those of the first part, and the finish reason is that of the last."""
    more: dict[str, Any] = {budget: 12, "logprobs": True, "return_token_ids": True}
    if stream:
        more |= {"stream": True, "stream_options": {"include_usage": True}}

    async def answer(stage: Served) -> Any:
        async with client_of(stage.app) as client:
            answered = await client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], **more})
        return chunks(answered.text) if stream else [answered.json()]

    async with chat_server() as stage:
        whole = await answer(stage)
    async with chat_server(engine={"block_at_step": 6}, count=1) as stage:
        (engine,) = stage.engines.engines
        asked = asyncio.create_task(answer(stage))
        await asyncio.to_thread(engine.started.wait, 20)
        pausing = asyncio.create_task(stage.router.pause("abort"))
        await until(lambda: stage.router.paused == "abort")
        engine.release.set()
        assert len((await pausing).aborted) == 1
        await stage.router.resume()
        parts = await asked

    def summary(events: list[Any]) -> Any:
        choices = [choice for event in events for choice in event["choices"]]
        said = [choice.get("message") or choice["delta"] for choice in choices]
        return {
            "ids": len({event["id"] for event in events}),
            "roles": [one["role"] for one in said if one.get("role")],
            "text": "".join(one.get("content") or "" for one in said),
            "token_ids": [token for choice in choices for token in choice.get("token_ids") or ()],
            "logprobs": [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())],
            "finish_reasons": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            "usage": [event["usage"]["completion_tokens"] for event in events if event.get("usage")],
        }

    assert summary(parts) == summary(whole)
    assert (summary(whole)["ids"], summary(whole)["usage"], len(summary(whole)["token_ids"])) == (1, [12], 12)
    assert (summary(whole)["roles"], summary(whole)["finish_reasons"]) == (["assistant"], ["length"])
