"""Random agents over HTTP in every protocol: every trained token is a sampled token, exactly once and in the context in
which it was sampled.

Completions are random tokens, so tokenizing their text again hardly ever gives the same tokens. Agents send them back
as the JSON of the protocol. They continue, edit, compact, fork and retry histories, with and without streaming, several
at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from byte_model import VOCAB, byte_tokenizer, qwen3
from conversation_fakes import BASE, chat_template_renderer
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Served, client_of, served

from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.serving.episode_store import EpisodeStore
from titan_rl.serving.policy import uninterrupted
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.types import Completion

TEXTS = ["a", "b a", "sort: b, a", " a"]
Token = tuple[int, float, tuple[int, ...]]  # token, logprob, and the tokens before it


@dataclass
class Stage:
    runner: asyncio.Runner
    served: Served
    store: EpisodeStore
    always_extends: bool


@pytest.fixture(scope="module", params=["chat template", "renderers package"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    is_template = request.param == "chat template"
    tokenizer: Any = load_tokenizer(BASE) if is_template else byte_tokenizer()
    renderer: Any = chat_template_renderer() if is_template else qwen3(tokenizer)
    engine = {"vocab_size": 400 if is_template else VOCAB, "mean_tokens": 5, "max_context": 4096}
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        store = EpisodeStore(renderer)
        app = {"tokenizer": tokenizer, "renderer": renderer, "episodes": store, "max_context": 4096}
        inner = runner.run(stack.enter_async_context(served(engine=engine, count=1, **app)))
        yield Stage(runner, inner, store, is_template)
        runner.run(stack.aclose())


class Chat:
    """Conversation in the form of one protocol's client."""

    path, items = "/v1/chat/completions", "messages"

    def __init__(self) -> None:
        self.said: list[Any] = []

    def body(self) -> dict[str, Any]:
        return {self.items: self.said, "max_tokens": 6}

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def fork(self) -> Chat:
        copy = type(self)()
        copy.said = list(self.said)
        return copy

    def answered(self, answer: Any) -> list[Any]:
        return [answer["choices"][0]["message"]]

    def streamed(self, events: list[Any]) -> list[Any]:
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(d.get("content") or "" for d in deltas)}
        if reasoning := "".join(delta.get("reasoning_content", "") for delta in deltas):
            message["reasoning_content"] = reasoning
        return [message]


class Messages(Chat):
    path = "/v1/messages"

    def answered(self, answer: Any) -> list[Any]:
        return [{"role": "assistant", "content": answer["content"] or ""}]


class Responses(Chat):
    path, items = "/v1/responses", "input"

    def body(self) -> dict[str, Any]:
        return {"input": self.said, "max_output_tokens": 6}

    def answered(self, answer: Any) -> list[Any]:
        return answer["output"]


class Agent:
    def __init__(self, stage: Stage, data: st.DataObject) -> None:
        self.sampled: list[Token] = []
        self.prompts: list[tuple[int, ...]] = []
        self.answers: list[tuple[int, ...]] = []  # prompts with their completions
        self._stage = stage
        self._draw = data.draw
        self.episode = stage.store.open("e", stream=uninterrupted(self._sample))
        self._conversations: list[Chat] = []

    async def _sample(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        completion = await self._stage.served.router.stream(request, on_chunk)
        context = tuple(request.prompt_token_ids)
        self.prompts.append(context)
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            self.sampled.append((token, logprob, context))
            context = (*context, token)
        self.answers.append(context)
        return completion

    async def act(self, client: httpx.AsyncClient) -> None:
        acts = [self._begin, self._continue, self._continue, self._continue, self._ask_again, self._edit, self._compact]
        for chosen in self._draw(st.lists(st.sampled_from([*acts, self._at_once]), min_size=1, max_size=8)):
            if not self._conversations:
                await self._begin(client)
            await chosen(client)

    async def _begin(self, client: httpx.AsyncClient) -> None:
        conversation = self._draw(st.sampled_from([Chat, Messages, Responses]))()
        conversation.said = [conversation.user(self._text())]
        self._conversations.append(conversation)
        await self._ask(client, conversation)

    async def _continue(self, client: httpx.AsyncClient) -> None:
        conversation = self._one()
        conversation.said.append(conversation.user(self._text()))
        await self._ask(client, conversation)
        before, number = len(self.prompts), len(self.answers) - 1
        conversation.said.append(conversation.user(self._text()))
        await self._ask(client, conversation)
        if self._stage.always_extends and len(self.prompts) > before:
            known = self.answers[number]
            assert self.prompts[-1][: len(known)] == known

    async def _ask_again(self, client: httpx.AsyncClient) -> None:
        conversation = self._one().fork()
        self._conversations.append(conversation)
        last = max(at for at, item in enumerate(conversation.said) if item.get("role") == "user")
        del conversation.said[last + 1 :]
        await self._ask(client, conversation)

    async def _edit(self, client: httpx.AsyncClient) -> None:
        conversation = self._one()
        at = self._draw(st.integers(0, len(conversation.said) - 1))
        if conversation.said[at].get("role") == "user":
            conversation.said[at] = conversation.user(self._text())
        await self._ask_again(client)

    async def _compact(self, client: httpx.AsyncClient) -> None:
        conversation = self._one()
        conversation.said = [conversation.user("in short: a")]
        await self._ask(client, conversation)

    async def _at_once(self, client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as asking:
            for _ in range(2):
                conversation = self._one().fork()
                conversation.said.append(conversation.user(self._text()))
                asking.create_task(self._ask(client, conversation))

    async def _ask(self, client: httpx.AsyncClient, conversation: Chat) -> None:
        body = conversation.body()
        if type(conversation) is Chat and self._draw(st.booleans()):
            answer = await client.post(conversation.path, json={**body, "stream": True})
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
            assert answer.status_code == 200, answer.text
            conversation.said += conversation.streamed([json.loads(line) for line in lines])
            return
        answer = await client.post(conversation.path, json=body)
        assert answer.status_code == 200, answer.text
        conversation.said += conversation.answered(answer.json())

    def _one(self) -> Chat:
        return self._draw(st.sampled_from(self._conversations))

    def _text(self) -> str:
        return self._draw(st.sampled_from(TEXTS))


@given(data=st.data())
@settings(max_examples=examples(300))
def test_trained_tokens_equal_sampled_tokens(stage: Stage, data: st.DataObject) -> None:
    async def talk() -> Agent:
        agent = Agent(stage, data)
        async with client_of(stage.served.app, authorization=f"Bearer {agent.episode.key}") as client:
            await agent.act(client)
        agent.episode.end()
        return agent

    agent = stage.runner.run(talk())
    rollout = Rollout("g/0", "g", 0, None, advantage=1.0)
    agent.episode.fill_in(rollout)
    assert rollout.status is RolloutStatus.COMPLETED
    trained = [
        (sample.token_ids[t], sample.behaviour_logprobs[t], tuple(sample.token_ids[:t]))
        for sample in build_samples(RolloutGroup("g", None, [rollout]))
        for t in range(len(sample.token_ids))
        if sample.loss_mask[t]
    ]
    assert sorted(trained) == sorted(agent.sampled)
