"""Player of a model behind OpenAI's chat protocol."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from titan_rl.core.errors import GenerationError
from titan_rl.tasks.players import Endpoint, EndpointPlayer

pytestmark = pytest.mark.looptime
ASKED = [{"role": "user", "content": "Heads or tails?"}]


class Server:
    """Server that gives these answers in turn, repeats the last one, and records the requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self._answers = list(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append({"url": str(request.url), **json.loads(request.content)})
        self.keys.append(request.headers.get("authorization"))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def said(content: Any) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": content}}]})


async def ask(server: Server, messages: Sequence[Any] = ASKED, **settings: Any) -> Any:
    endpoint = EndpointPlayer(
        Endpoint(url="http://x/v1/", model="m", **settings), transport=httpx.MockTransport(server)
    )
    try:
        return await endpoint.reply(messages)
    finally:
        await endpoint.close()


async def test_reply_is_the_endpoints_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server = Server(said("heads"))
    answer = await ask(server, api_key="MY_KEY", temperature=0.5)
    assert answer == {"role": "assistant", "content": "heads"}
    assert server.asked == [
        {"url": "http://x/v1/chat/completions", "model": "m", "messages": ASKED, "temperature": 0.5}
    ]
    assert server.keys == ["Bearer secret"]


async def test_beginning_of_the_reply_is_continued() -> None:
    server = Server(said(" tails"))
    await ask(server, [*ASKED, {"role": "assistant", "content": "I choose"}])
    (asked,) = server.asked
    assert asked["messages"] == [*ASKED, {"role": "assistant", "content": "I choose"}]
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)


async def test_retries_transient_errors_until_the_timeout() -> None:
    server = Server(httpx.ConnectError("no"), httpx.Response(429), httpx.Response(503), said("tails"))
    assert (await ask(server))["content"] == "tails"
    with pytest.raises(TimeoutError):
        await ask(Server(httpx.Response(429)), timeout_s=30.0)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (httpx.Response(401, text="who are you?"), "answered 401: who are you"),
        (httpx.Response(200, json={"choices": []}), "that is not a message"),
        (httpx.Response(200, text="hello"), "that is not a message"),
    ],
)
async def test_permanent_errors_are_not_retried(answer: httpx.Response, error: str) -> None:
    with pytest.raises(GenerationError, match=error):
        await ask(Server(answer))
