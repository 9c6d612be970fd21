"""`HttpChatFn`: its requests, and the parsing of answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from serving.conversation_fakes import SAMPLING, chat_template_renderer, user
from serving.served import served

from titan_rl import FinishReason, GenerationError, PromptTooLongError, RequestError, SamplingParams
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.serving.client import HttpChatFn


class Server:
    """Server that gives scripted answers and records the requests."""

    def __init__(self, *answers: Callable[[], httpx.Response]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self._answers = list(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(json.loads(request.content))
        self.headers.append(request.headers)
        return self._answers.pop(0)()

    def client(self, **settings: Any) -> HttpChatFn:
        return HttpChatFn("http://server/v1", model="m", transport=httpx.MockTransport(self), **settings)


def says(content: Any, finish_reason: str = "stop", **message: Any) -> Callable[[], httpx.Response]:
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    return lambda: httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 7}})


def fails(status: int, text: str = "no", **headers: str) -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(status, json={"error": {"message": text}}, headers=headers)


async def test_request_body_follows_the_openai_format() -> None:
    server = Server(says("Hello", reasoning_content="Greet."))
    calls = [{"type": "function", "id": None, "function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [
        user("Add."),
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [*calls, *calls]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    sampling = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, seed=3, stop_token_ids=(1,))
    async with server.client(api_key="sesame", body={"seed": None, "reasoning_effort": "low"}) as chat:
        reply = await chat(messages, tools=[{"type": "function"}], request_id="a", session_id="s", sampling=sampling)
    assert reply.message == {"role": "assistant", "content": "Hello", "reasoning_content": "Greet."}
    assert (reply.finish_reason, reply.num_tokens) == (FinishReason.STOP, 7)
    (asked,) = server.asked
    first, second = (call["id"] for call in asked["messages"][1].pop("tool_calls"))
    assert first != second
    assert asked == {
        "model": "m",
        "messages": [
            user("Add."),
            {"role": "assistant", "content": ""},
            {"role": "tool", "content": "1", "tool_call_id": first},
            {"role": "tool", "content": "2", "tool_call_id": second},
        ],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": [{"type": "function"}],
        "reasoning_effort": "low",
    }
    assert server.headers[0]["authorization"] == "Bearer sesame"
    assert server.headers[0]["x-session-id"] == "s"


async def test_beginning_of_a_reply_is_continued_by_the_server() -> None:
    begun = {"role": "assistant", "content": "", "reasoning_content": "Let me", "prefix": True}
    rest = {"role": "assistant", "content": "5", "reasoning_content": "see.", "written": " see.</think>5"}
    server = Server(says(" see.</think>5"), says("fine"))
    async with server.client() as chat:
        for messages in ([user("2 + 3?"), begun], [user("2 + 3?"), begun, rest, user("Sure?")]):
            await chat(messages, request_id="a", sampling=SAMPLING)
    first, second = server.asked
    assert (first["continue_final_message"], first["add_generation_prompt"]) == (True, False)
    assert first["messages"] == [user("2 + 3?"), {"role": "assistant", "content": "<think>\nLet me"}]
    assert "continue_final_message" not in second
    assert second["messages"] == [
        user("2 + 3?"),
        {"role": "assistant", "content": "<think>\nLet me see.</think>5"},
        user("Sure?"),
    ]


async def test_tool_calls_are_parsed_and_malformed_arguments_kept_as_text() -> None:
    good = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    bad = {"id": "c2", "function": {"name": "add", "arguments": "[1"}}
    server = Server(says(None, "tool_calls", tool_calls=[good, bad]))
    async with server.client() as chat:
        reply = await chat([user("Add.")], request_id="a", sampling=SAMPLING)
    assert [call["function"]["arguments"] for call in reply.message["tool_calls"]] == [{"a": 1}, "[1"]
    assert reply.message["content"] == ""
    assert reply.finish_reason is FinishReason.STOP


async def test_retries_busy_servers_but_not_refusals() -> None:
    server = Server(fails(429, **{"retry-after": "0"}), fails(503), says("Hello", "length"))
    async with server.client() as chat:
        reply = await chat([user("Hi")], request_id="a", sampling=SAMPLING)
    assert reply.finish_reason is FinishReason.LENGTH
    assert len(server.asked) == 3
    server = Server(fails(503), fails(503), fails(400, "bad"), fails(401, "who"), says(None, "content_filter"))
    async with server.client(connection_attempts=2) as chat:
        for error, text in (
            (GenerationError, "503"),
            (RequestError, "bad"),
            (GenerationError, "401: who"),
            (RequestError, "withholds"),
        ):
            with pytest.raises(error, match=text):
                await chat([user("Hi")], request_id="a", sampling=SAMPLING)


async def test_overlong_prompt_raises_prompt_too_long_error() -> None:
    server = Server(fails(400, "This model's maximum context length is 512 tokens."))
    async with server.client() as chat:
        with pytest.raises(PromptTooLongError, match="512"):
            await chat([user("Hi")], request_id="a", sampling=SAMPLING)


async def test_switches_to_max_completion_tokens_when_the_server_requires_it() -> None:
    server = Server(fails(400, "use 'max_completion_tokens' instead"), says("one"), says("two"))
    async with server.client() as chat:
        for _ in range(2):
            await chat([user("Hi")], request_id="a", sampling=SamplingParams(max_tokens=9))
    assert [asked.get("max_completion_tokens") for asked in server.asked] == [None, 9, 9]


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": {"content": [1]}}]}, [], "no"])
async def test_malformed_reply_is_a_generation_error(answer: Any) -> None:
    server = Server(lambda: httpx.Response(200, json=answer))
    async with server.client() as chat:
        with pytest.raises(GenerationError, match="an invalid reply"):
            await chat([user("Hi")], request_id="a", sampling=SAMPLING)


async def test_titan_rl_server_answers() -> None:
    renderer = chat_template_renderer()
    tokenizer = load_tokenizer(str(renderer._name))
    async with served(renderer=renderer, tokenizer=tokenizer, engine={"vocab_size": 90}) as server:
        transport = httpx.ASGITransport(server.app)
        async with HttpChatFn("http://policy", model="policy", transport=transport) as chat:
            reply = await chat([user("Sort: b a")], request_id="a", sampling=SamplingParams(max_tokens=5, seed=1))
            assert isinstance(reply.message["content"], str)
            assert (reply.finish_reason, reply.num_tokens) == (FinishReason.LENGTH, 5)
            with pytest.raises(PromptTooLongError):
                await chat([user("a " * 600)], request_id="b", sampling=SAMPLING)
