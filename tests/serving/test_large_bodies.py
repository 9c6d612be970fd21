"""Large bodies, whose processing must not delay other requests."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from background import HANG_S
from clients import TOKENIZER, chat_server
from pydantic import ValidationError
from served import client_of

from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.protocols.anthropic import MessagesBody
from titan_rl.serving.protocols.openai.bodies import ChatBody, CompletionBody, ResponsesBody
from titan_rl.serving.protocols.tokens import GenerateBody

LONG = "word " * 20_000


class Stuck:
    """Tokenizer and renderer that block on a long text until the test sets `go_on`.

    Args:
        can_copy: Whether threads can copy it.
    """

    def __init__(self, *, can_copy: bool = True) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self._can_copy = can_copy
        self._renderer = ChatTemplateRenderer(TOKENIZER)

    def __deepcopy__(self, memo: Any) -> Stuck:
        if not self._can_copy:
            raise TypeError("it holds a lock")
        other = Stuck()
        other.began, other.go_on = self.began, self.go_on
        return other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer if hasattr(self._renderer, name) else TOKENIZER, name)

    def encode(self, text: str, **more: Any) -> list[int]:
        self._wait(len(text))
        return TOKENIZER.encode(text, **more)

    def render_ids(self, messages: Any, **more: Any) -> list[int]:
        self._wait(sum(len(message["content"]) for message in messages))
        return self._renderer.render_ids(messages, **more)

    def _wait(self, length: int) -> None:
        if length >= len(LONG):
            self.began.set()
            assert self.go_on.wait(20)


ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}),
]


@pytest.mark.parametrize("can_copy", [True, False])
@pytest.mark.parametrize(("path", "body"), ASKS, ids=lambda value: value if isinstance(value, str) else "")
async def test_other_requests_are_answered_while_a_long_text_is_tokenized(
    path: str, body: dict[str, Any], can_copy: bool
) -> None:
    """Other requests wait for the tokenizer only if it cannot be copied."""
    stuck = Stuck(can_copy=can_copy)
    async with chat_server(stuck, tokenizer=stuck) as stage, client_of(stage.app) as client, asyncio.timeout(HANG_S):
        asked = asyncio.create_task(client.post(path, json=body))
        await asyncio.to_thread(stuck.began.wait, 20)
        assert stage.app.exchanges.num_completions_running == 1
        sky = {"messages": [{"role": "user", "content": "sky"}]}
        short = asyncio.create_task(client.post("/v1/chat/completions", json=sky))
        assert (await client.get("/health")).status_code == 200
        if can_copy:
            await short
        assert not asked.done()
        stuck.go_on.set()
        assert (await asked).status_code == 400  # it is longer than the context
        assert (await short).json()["choices"][0]["message"]["content"] == "blue"
        assert stage.app.exchanges.num_completions_running == 0


async def test_request_times_out_during_tokenization() -> None:
    stuck = Stuck()
    limits = ServerLimits(request_s=0.05)
    async with chat_server(stuck, tokenizer=stuck, limits=limits) as stage, client_of(stage.app) as client:
        answer = await client.post("/v1/completions", json={"prompt": LONG})
        stuck.go_on.set()
    assert (answer.status_code, stage.app.exchanges.num_completions_running) == (504, 0)


@pytest.mark.parametrize(
    ("kind", "name", "most"),
    [
        (GenerateBody, "token_ids", 1),
        (CompletionBody, "prompt", 4),  # one for each allowed type
        (ChatBody, "messages", 1),
        (ChatBody, "tools", 1),
        (ChatBody, "stop", 2),
        (ChatBody, "stop_token_ids", 1),
        (ResponsesBody, "input", 2),
        (MessagesBody, "messages", 1),
        (MessagesBody, "system", 2),
    ],
)
def test_validation_reports_few_of_many_invalid_items(kind: Any, name: str, most: int) -> None:
    wrong = [None] * 1000
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps({name: wrong}))
    assert sum(error["loc"][0] == name for error in caught.value.errors()) <= most


async def test_too_many_fields_error_gives_their_number() -> None:
    body = {f"field{number}": 1 for number in range(10_000)}
    async with chat_server() as stage, client_of(stage.app) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "10000 fields" in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", ["[" * 40_000 + "]" * 40_000, '{"a":' * 40_000 + "1" + "}" * 40_000])
@pytest.mark.parametrize("path", [*(path for path, _ in ASKS), "/inference/v1/generate", "/v1/messages/count_tokens"])
async def test_too_deeply_nested_json_is_a_400(path: str, value: str) -> None:
    async with chat_server() as stage, client_of(stage.app) as client:
        for body in (value, f'{{"messages": [{{"role": "user", "content": {value}}}]}}'):
            answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, "Invalid JSON" in answer.text) == (400, True)


async def test_long_body_is_parsed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests are parsed and answered meanwhile."""
    began, go_on, read = threading.Event(), threading.Event(), ChatBody.model_validate_json

    def slowly(body: bytes) -> ChatBody:
        if len(body) > len(LONG):
            began.set()
            assert go_on.wait(20)
        return read(body)

    monkeypatch.setattr(ChatBody, "model_validate_json", slowly)
    async with chat_server() as stage, client_of(stage.app) as client, asyncio.timeout(HANG_S):
        asked = [
            asyncio.create_task(
                client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
            )
            for text in (LONG, "sky")
        ]
        await asyncio.to_thread(began.wait, 20)
        assert (await asked[1]).json()["choices"][0]["message"]["content"] == "blue"
        assert not asked[0].done()
        go_on.set()
        assert (await asked[0]).status_code == 400  # it is longer than the context
