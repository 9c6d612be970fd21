"""Top logprobs at each position, in each of OpenAI's protocols, and without support by the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from clients import TOKENIZER, chat_server, openai_client
from served import Served, client_of, until

from titan_rl.generation.continuation import request_fn
from titan_rl.serving.app import make_app

ASKED: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "sky"}]}
PIECES = ["b", "l", "u", "e", "<|im_end|>"]


def rows_of(content: Any) -> list[list[tuple[str, float]]]:
    return [[(top.token, top.logprob) for top in one.top_logprobs] for one in content]


def check(content: Any, count: int) -> None:
    assert [one.token for one in content] == PIECES
    for one in content:
        values = [top.logprob for top in one.top_logprobs]
        assert len(values) == count
        assert values == sorted(values, reverse=True)
        by_token = {top.token: top.logprob for top in one.top_logprobs}
        assert one.logprob <= values[-1] or by_token[one.token] == one.logprob


@pytest.mark.parametrize("count", [1, 20])
async def test_chat_returns_the_requested_number_of_top_logprobs(count: int) -> None:
    async with chat_server() as stage, openai_client(stage) as client:
        asked = {**ASKED, "logprobs": True, "top_logprobs": count}
        whole = await client.chat.completions.create(**asked)
        content = whole.choices[0].logprobs.content
        check(content, count)
        stream = await client.chat.completions.create(**asked, stream=True)
        parts = [choice.logprobs.content async for event in stream for choice in event.choices if choice.logprobs]
    assert rows_of([one for part in parts for one in part or ()]) == rows_of(content)


async def test_text_completions_include_the_sampled_token() -> None:
    asked: dict[str, Any] = {"model": "policy", "prompt": "<|im_start|>assistant\n", "max_tokens": 4, "logprobs": 2}
    async with chat_server() as stage, openai_client(stage) as client:
        whole = (await client.completions.create(**asked)).choices[0].logprobs
        stream = await client.completions.create(**asked, stream=True)
        parts = [choice.logprobs.top_logprobs async for event in stream for choice in event.choices if choice.logprobs]
    assert [row for part in parts for row in part or ()] == whole.top_logprobs
    for token, logprob, row in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert row[token] >= logprob
        assert len(row) in (2, 3)


async def test_responses_include_top_logprobs_on_request() -> None:
    asked: dict[str, Any] = {"model": "policy", "input": "sky", "top_logprobs": 3}
    async with chat_server() as stage, openai_client(stage) as client:
        included = await client.responses.create(**asked, include=["message.output_text.logprobs"])
        check(included.output[0].content[0].logprobs, 3)
        assert (await client.responses.create(**asked)).output[0].content[0].logprobs is None


async def test_token_endpoint_returns_top_logprobs_as_token_ids() -> None:
    async with chat_server(engine={"script": None}) as stage, client_of(stage.app) as client:
        for logprobs, count in ((0, 0), (1, 0), (2, 2)):
            body = {"token_ids": TOKENIZER.encode("hi"), "sampling_params": {"max_tokens": 3, "logprobs": logprobs}}
            (choice,) = (await client.post("/inference/v1/generate", json=body)).json()["choices"]
            for one in choice["logprobs"]["content"]:
                assert len(one["top_logprobs"]) == count
                assert all(top["token"] == f"token_id:{top['token_id']}" for top in one["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
async def test_missing_top_logprobs_are_a_400_that_names_the_field(stream: bool) -> None:
    async with chat_server(engine={"script": None}) as stage:
        app = make_app(request_fn(_without(stage)), model="policy", max_context=512, tokenizer=TOKENIZER)
        async with client_of(app) as client:
            body = {"prompt": "x", "max_tokens": 3, "logprobs": 2, "stream": stream}
            response = await client.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")
        await until(lambda: app.exchanges.num_completions_running == 0)


def _without(stage: Served) -> Any:
    async def generate(prompt: Any, *, request_id: str, session_id: str | None = None, sampling: Any) -> Any:
        alone = replace(sampling, top_logprobs=0)
        return await stage.router.generate(prompt, request_id=request_id, session_id=session_id, sampling=alone)

    return generate
