"""Tool calls that a policy samples, well-formed or not. In every protocol the answer is valid JSON, is the same whole
and streamed, and continues from the sampled tokens when a client sends it back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from byte_model import byte_tokenizer, qwen3
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_replies import PROTOCOLS, Said
from served import client_of

from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.rollout.renderer.chat_template import ChatTemplateRenderer, ParsedText
from titan_rl.serving.app import PolicyApp, make_app
from titan_rl.serving.episode import Episode
from titan_rl.serving.episode_store import EpisodeStore
from titan_rl.types import Completion, FinishReason, TokenChunk, VersionSpan

TOKENIZER = byte_tokenizer()


class Policy:
    """Policy that generates a given text in chunks of given sizes."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.sizes: Sequence[int] = (1,)

    def will_say(self, text: str, sizes: Sequence[int], *, ends: bool = True) -> None:
        self.token_ids = TOKENIZER.encode(text + "<|im_end|>" * ends, add_special_tokens=False)
        self.sizes = sizes

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        ids, at, number = self.token_ids, 0, 0
        while at < len(ids):
            piece = ids[at : at + self.sizes[number % len(self.sizes)]]
            on_chunk(TokenChunk(request.request_id, piece, [-1.0] * len(piece), (VersionSpan(0, len(piece)),)))
            at, number = at + len(piece), number + 1
        reason = FinishReason.STOP if TOKENIZER.decode(ids[-1:]) == "<|im_end|>" else FinishReason.LENGTH
        return Completion(request.request_id, list(ids), [-1.0] * len(ids), reason, (VersionSpan(0, len(ids)),))


class Renderer(ChatTemplateRenderer):
    """Renderer that parses Qwen3's replies, and extends every turn."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self._qwen3 = qwen3(TOKENIZER)

    def parse_response(self, token_ids: Sequence[int], **more: Any) -> Any:
        return self._qwen3.parse_response(list(token_ids), **more)


POLICY = Policy()
RENDERER = Renderer()


def an_app(renderer: Any, **more: Any) -> PolicyApp:
    settings = {"tokenizer": TOKENIZER, "renderer": renderer, **more}
    return make_app(POLICY.stream, model="policy", max_context=32768, **settings)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def reply_items(client: httpx.AsyncClient, protocol: Any, items: list[Any], *, stream: bool) -> list[Any]:
    """Request a reply, and return its items. Streamed items are joined."""
    answer = await client.post(protocol.path, json={**protocol.body(items), "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return protocol.whole(strict(answer.text))
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
    events = [strict(line) for line in lines]
    assert not any("error" in event and event["error"] for event in events), events[-1]
    return protocol.streamed(events)


def strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not valid JSON")

    return json.loads(text, parse_constant=refuse)


async def prompt_of(client: httpx.AsyncClient, protocol: Any, items: list[Any]) -> list[int]:
    answer = await client.post(protocol.path, json={**protocol.body(items), "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt_token_ids"]


async def check(client: httpx.AsyncClient) -> Said:
    """Check the reply in all protocols, and return its content."""
    said: list[Said] = []
    asked = [{"role": "user", "content": "hi"}]
    for protocol in PROTOCOLS:
        known = [*await prompt_of(client, protocol, asked), *POLICY.token_ids]
        for stream in (False, True):
            reply = await reply_items(client, protocol, asked, stream=stream)
            said.append(protocol.said(reply))
            json.dumps(said[-1], ensure_ascii=False, allow_nan=False).encode()
            assert all(isinstance(arguments, dict) for _, arguments in said[-1][2])
            more = await prompt_of(client, protocol, [*asked, *reply, *protocol.answers(reply)])
            assert more[: len(known)] == known
    assert all(one == said[0] for one in said), said
    return said[0]


def check_sampled(runner: asyncio.Runner) -> Said:
    async def talk() -> Said:
        async with client_of(an_app(RENDERER)) as client:
            return await check(client)

    return runner.run(talk())


STRINGS = [r'"a"', r'"\ud800"', r'"\udc00\ud83d"', r'"\ud83d\ude00"', r'"ü\u2028\u0000"', '"', '"stop', "'a'"]
NUMBERS = [
    "1",
    "-0.0",
    "1.5e3",
    "1e999",
    "-1e999",
    "NaN",
    "-Infinity",
    "123456789012345678901234",
    "1" * 400,
    "1" * 5000,
]
VALUES = st.recursive(
    st.sampled_from(
        [*STRINGS, *NUMBERS, "true", "null", "", "{", "}", "[", r'"{\"a\": 1}"', r'"{\"a\": \"\\ud800\"}"']
    ),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(st.sampled_from(STRINGS), inner, max_size=2).map(
            lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}"
        )
    ),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.sampled_from(STRINGS[:5]), VALUES, min_size=1, max_size=2).map(
    lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}"
)
CALLED = st.builds(
    '{{"name": {}, "arguments": {}}}'.format,
    st.sampled_from(['"f"', '"f"', '"g"', *STRINGS, "1", "{}"]),
    OBJECTS | VALUES,
)
CALLS = st.builds(
    "{}{}{}".format, st.just("<tool_call>\n"), CALLED | VALUES, st.sampled_from(["\n</tool_call>"] * 4 + ["", "\n"])
)
THOUGHTS = ["", "", "<think>\nhm\n</think>\n\n", "<think> hm ", " <think>\n", "<think>", "hm</think>", "</think>"]
WORDS = st.sampled_from(["", "", " So.\n", "\n\n", "<", "{", "ü "])


@given(
    st.builds("{}{}{}{}{}".format, st.sampled_from(THOUGHTS), WORDS, CALLS, WORDS, CALLS | WORDS),
    st.none() | st.integers(0, 120),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
)
@settings(max_examples=examples(240), deadline=None)
def test_every_sampled_tool_call_round_trips(
    runner: asyncio.Runner, text: str, cut: int | None, sizes: list[int]
) -> None:
    POLICY.will_say(text[:cut], sizes, ends=cut is None)
    check_sampled(runner)


@pytest.mark.parametrize(
    "call",
    [
        *(
            f'{{"name": "f", "arguments": {arguments}}}'
            for arguments in ('"str"', "[1]", "[]", "3", "true", '"{"', '""')
        ),
        *(f'{{"name": "f", "arguments": {{"a": {value}}}}}' for value in ("NaN", "[-Infinity]", "1e999", r'"\ud800"')),
        r'{"name": "f", "arguments": {"\udc00": 1}}',
        r'{"name": "f", "arguments": "{\"a\": \"\\ud800\"}"}',
        r'{"name": "\ud800", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": {"a": 1}',
    ],
)
def test_malformed_tool_call_is_returned_as_content(runner: asyncio.Runner, call: str) -> None:
    POLICY.will_say(f"<tool_call>\n{call}\n</tool_call>", [3])
    assert check_sampled(runner) == ("", call, [])


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 5000 + "]" * 5000], ids=["number", "nested"])
@pytest.mark.parametrize("sizes", [[10] * 8 + [2000], [20000]], ids=["in pieces", "at once"])
@pytest.mark.parametrize("thought", [" So.\n", "<think>\nhm\n</think>\n\n"])
def test_tool_call_that_breaks_the_renderer_is_returned_as_content(
    runner: asyncio.Runner, thought: str, value: str, sizes: list[int]
) -> None:
    POLICY.will_say(f'{thought}<tool_call>\n{{"name": "f", "arguments": {{"a": {value}}}}}\n</tool_call>', sizes)
    reasoning, content, calls = check_sampled(runner)
    assert (reasoning, calls) == ("hm" if "hm" in thought else "", [])
    assert value in content


@pytest.mark.parametrize("value", ["123456789012345678901234", r'"\ud83d\ude00"', "[null, {}]", r'"\u2028\u0000"'])
def test_valid_tool_call_is_returned_as_a_call(runner: asyncio.Runner, value: str) -> None:
    POLICY.will_say(f'<tool_call>\n{{"name": "f", "arguments": {{"a": {value}}}}}\n</tool_call>', [3])
    assert check_sampled(runner) == ("", "", [("f", {"a": json.loads(value)})])


@pytest.mark.parametrize("text", ["<think> not closed", "<think>\n\n a \n", " <think> a\n b"])
def test_unclosed_reasoning_is_stripped(runner: asyncio.Runner, text: str) -> None:
    POLICY.will_say(text, [1], ends=False)
    assert check_sampled(runner) == (text.strip().removeprefix("<think>").strip(), "", [])


class Unsendable(Renderer):
    """Renderer whose text has a lone surrogate, which UTF-8 cannot encode."""

    def parse_response(self, token_ids: Sequence[int], **more: Any) -> Any:
        return ParsedText("\ud800")


class Unspeakable:
    """Tokenizer whose text has lone surrogates."""

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def encode(self, text: str) -> list[int]:
        return [1]

    def decode(self, token_ids: Sequence[int], **more: Any) -> str:
        return "\ud800" * len(token_ids)


@asynccontextmanager
async def an_episode(renderer: Any, **app: Any) -> AsyncIterator[tuple[Episode, httpx.AsyncClient]]:
    store = EpisodeStore(renderer)
    episode = store.open("e")
    async with client_of(an_app(renderer, episodes=store, **app), authorization=f"Bearer {episode.key}") as client:
        yield episode, client
    episode.end()


@pytest.mark.parametrize("stream", [False, True])
async def test_unsendable_reply_is_not_recorded(stream: bool) -> None:
    POLICY.will_say("a", [1])
    async with an_episode(Unsendable()) as (episode, client):
        for protocol in PROTOCOLS:
            body = {**protocol.body([{"role": "user", "content": "hi"}]), "stream": stream}
            answer = await client.post(protocol.path, json=body)
            assert answer.status_code == 500 or '"error"' in answer.text
        assert episode.num_turns == 0
    async with an_episode(RENDERER, tokenizer=Unspeakable()) as (episode, client):
        answer = await client.post("/v1/completions", json={"prompt": [5, 6], "stream": stream})
        assert answer.status_code == 500 or '"error"' in answer.text
        assert episode.num_turns == 0
    async with an_episode(RENDERER) as (episode, client):
        for protocol in PROTOCOLS:
            body = {**protocol.body([{"role": "user", "content": "hi"}]), "stream": stream}
            assert (await client.post(protocol.path, json=body)).status_code == 200
        assert episode.num_turns == len(PROTOCOLS)
