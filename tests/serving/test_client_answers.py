"""Answers that `HttpGenerateFn` accepts, and errors for others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from background import HANG_S

from titan_rl.core.errors import GenerationError
from titan_rl.serving.client import HttpGenerateFn
from titan_rl.types import Completion, SamplingParams


@pytest.mark.parametrize("said", [{}, {"choices": []}, {"choices": [{"token_ids": [1], "finish_reason": "stop"}]}, []])
async def test_malformed_completion_is_a_generation_error(said: Any) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=said))
    async with HttpGenerateFn("http://policy", transport=transport) as ask:
        with pytest.raises(GenerationError, match="invalid completion"):
            await ask([1], request_id="r", sampling=SamplingParams(2))


def completion(token_ids: str = "[5, 6]", logprobs: str = "[-0.1, 0.0001]", **more: str) -> str:
    content = ", ".join(f'{{"logprob": {logprob}}}' for logprob in logprobs.strip("[]").split(","))
    fields = {"token_ids": token_ids, "finish_reason": '"length"', "logprobs": f'{{"content": [{content}]}}', **more}
    choice = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    return f'{{"choices": [{{{choice}}}]}}'


async def completion_from(said: str, status: int = 200) -> Completion:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=said))
    async with HttpGenerateFn("http://policy", transport=transport) as ask:
        return await ask([1], request_id="r", sampling=SamplingParams(2))


async def test_accepts_positive_logprobs_only_within_rounding() -> None:
    assert (await completion_from(completion())).logprobs == [-0.1, 0.0001]
    with pytest.raises(GenerationError, match=r"a logprob is 1\.0; it must be a number .* not above 0"):
        await completion_from(completion(logprobs="[-0.1, 1.0]"))


@pytest.mark.parametrize("token_id", ["1.0", "true", '"1"', "null", "-1", str(10**30)])
async def test_rejects_invalid_token_ids(token_id: str) -> None:
    with pytest.raises(GenerationError, match=r"token_ids has .*; it must be an integer between 0 and 2147483647"):
        await completion_from(completion(token_ids=f"[5, {token_id}]"))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("[" * 100_000, "RecursionError"),
        (completion(token_ids="[1, 2, 3]", logprobs="[-1, -1, -1]"), "it has 3 tokens; max_tokens is 2"),
        (completion(logprobs="[-1, NaN]"), "a logprob is nan"),
        (completion(logprobs="[-1, true]"), "a logprob is True"),
        (completion(weight_versions='[{"version": "1", "start": 1, "end": 3}]'), "continues at token 0 with 1 to 3"),
        (completion().replace("[{", '[{"a": 1}, {', 1), "too many values"),
        (completion()[:-1] + ', "usage": [1]}', "AttributeError"),
    ],
)
async def test_unparsable_answer_error_gives_the_reason(said: str, why: str) -> None:
    with pytest.raises(GenerationError, match=f"invalid completion: .*{why}"):
        await completion_from(said)


async def test_unparsable_error_body_still_reports_the_status() -> None:
    with pytest.raises(GenerationError, match="answered 500: "):
        await completion_from("[" * 100_000, status=500)


async def test_rejects_a_prompt_logprob_of_the_first_token() -> None:
    """The logprobs of a server that scores the first token may be those of the tokens after their positions."""
    entries = [{"1": {"logprob": -1.0}}, {"2": {"logprob": -2.0}}]
    said = json.loads(completion()) | {"prompt_logprobs": entries}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=said))
    async with HttpGenerateFn("http://policy", transport=transport) as ask:
        with pytest.raises(GenerationError, match="for the first token, which follows no other"):
            await ask([1, 2], request_id="r", sampling=SamplingParams(2, prompt_logprobs=0))


@pytest.mark.parametrize("entry", [None, 1.0, [-1.0]])
async def test_rejects_partial_prompt_logprobs(entry: Any) -> None:
    said = json.loads(completion()) | {"prompt_logprobs": [None, entry]}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=said))
    async with HttpGenerateFn("http://policy", transport=transport) as ask:
        with pytest.raises(GenerationError, match="at one position; it must be logprobs by token id"):
            await ask([1, 2], request_id="r", sampling=SamplingParams(2, prompt_logprobs=0))


@pytest.mark.looptime
async def test_does_not_wait_when_retry_after_exceeds_the_timeout() -> None:
    clock = asyncio.get_running_loop().time
    busy = httpx.Response(429, json={"error": {"message": "daily quota"}}, headers={"retry-after": "3600"})
    began = clock()
    async with HttpGenerateFn("http://policy", timeout_s=60, transport=httpx.MockTransport(lambda _: busy)) as ask:
        with pytest.raises(GenerationError, match="answered 429: daily quota"):
            await ask([1], request_id="r", sampling=SamplingParams(2))
    assert clock() == began


async def test_closing_the_client_fails_a_request_waiting_to_retry() -> None:
    reached = asyncio.Event()

    def lost(request: httpx.Request) -> httpx.Response:
        reached.set()
        raise httpx.ConnectError("lost", request=request)

    client = HttpGenerateFn("http://policy", transport=httpx.MockTransport(lost))
    asked = asyncio.ensure_future(client([1], request_id="r", sampling=SamplingParams(2)))
    async with asyncio.timeout(HANG_S):
        await reached.wait()
        await client.close()
        with pytest.raises(GenerationError, match=r"the client of http://policy/inference/v1/generate is closed"):
            await asked
