"""Server URLs, which are accepted everywhere with and without the "/v1" of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from byte_tokenizer import byte_tokenizer
from serving.conversation_fakes import SAMPLING, user

from titan_rl import GenerationError
from titan_rl.config.evaluation import EvalConfig
from titan_rl.evaluation.policies.inference import open_endpoint
from titan_rl.run.open_teachers import TokenCheck, check_tokens
from titan_rl.serving.client import HttpChatFn, HttpGenerateFn
from titan_rl.tasks import ServedClassifier
from titan_rl.tasks.players import Endpoint, EndpointPlayer
from titan_rl.tasks.policy_servers import Served

Ask = Callable[[str, httpx.MockTransport], Awaitable[object]]


async def ask_a_judge_or_an_endpoint_that_is_evaluated(url: str, server: httpx.MockTransport) -> None:
    async with HttpChatFn(url, model="m", transport=server) as chat:
        await chat([user("Hello")], request_id="a", sampling=SAMPLING)


async def ask_a_player(url: str, server: httpx.MockTransport) -> None:
    player = EndpointPlayer(Endpoint(url=url, model="m"), transport=server)
    try:
        await player.reply([user("Hello")])
    finally:
        await player.close()


async def ask_for_the_models(url: str, server: httpx.MockTransport) -> None:
    config: Any = None
    async with open_endpoint(url, config, EvalConfig(), server):
        pass


async def ask_a_teacher(url: str, server: httpx.MockTransport) -> None:
    async with HttpGenerateFn(url, transport=server) as generate:
        await generate([1], request_id="a", sampling=SAMPLING)


async def check_a_teacher(url: str, server: httpx.MockTransport) -> None:
    await check_tokens("big", Served(url, ""), None, TokenCheck(byte_tokenizer()), transport=server)


async def ask_a_reward_model(url: str, server: httpx.MockTransport) -> None:
    score = ServedClassifier(url, "m", transport=server)
    try:
        await score(["Hello"])
    finally:
        await score.close()


async def asked(ask: Ask, url: str) -> str:
    urls: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        urls.append(str(request.url))
        return httpx.Response(401)

    with suppress(GenerationError, ValueError):
        await ask(url, httpx.MockTransport(refuse))
    (found,) = urls
    return found


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
@pytest.mark.parametrize(
    ("ask", "path"),
    [
        (ask_a_judge_or_an_endpoint_that_is_evaluated, "/v1/chat/completions"),
        (ask_a_player, "/v1/chat/completions"),
        (ask_for_the_models, "/v1/models"),
        (ask_a_teacher, "/inference/v1/generate"),
        (check_a_teacher, "/tokenize"),
        (ask_a_reward_model, "/classify"),
    ],
)
async def test_url_with_or_without_v1(ask: Ask, path: str, url: str) -> None:
    assert await asked(ask, url) == f"http://h:1{path}"


@pytest.mark.parametrize(
    "ask", [ask_a_judge_or_an_endpoint_that_is_evaluated, ask_a_player], ids=lambda ask: ask.__name__
)
async def test_url_with_another_version_is_unchanged(ask: Ask) -> None:
    assert await asked(ask, "https://v2.host/v1beta/openai/") == "https://v2.host/v1beta/openai/chat/completions"
