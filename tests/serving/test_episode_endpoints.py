"""Episodes over HTTP: access by key, recording through each protocol, rewards, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
from byte_model import VOCAB, byte_tokenizer, qwen3, script
from served import Engines, Served, client_of, served, until

from titan_rl.core.errors import BusyError
from titan_rl.generation.continuation import request_fn
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.serving.api_keys import Keys
from titan_rl.serving.episode import Episode
from titan_rl.serving.episode_store import EpisodeStore, Opened
from titan_rl.serving.policy import uninterrupted
from titan_rl.training.data.sample_builder import build_samples

TOKENIZER = byte_tokenizer()
CHAT = "/v1/chat/completions"
CHATTING = script(TOKENIZER, lambda asked: asked.upper())
START = TOKENIZER.convert_tokens_to_ids("<|im_start|>")


def speak(context: Sequence[int]) -> int:
    return CHATTING(context) if START in context else len(context)


SPEAKING = {"script": speak, "vocab_size": VOCAB}


@dataclass
class Stage(Served):
    store: EpisodeStore

    def agent(self, episode: Episode, *, own_url: bool = False) -> httpx.AsyncClient:
        client = client_of(self.app, authorization=f"Bearer {episode.key}")
        if own_url:
            client.base_url = f"http://policy/episodes/{episode.id}"
        return client


@asynccontextmanager
async def stage(engine: dict[str, Any] = SPEAKING, **app: Any) -> AsyncIterator[Stage]:
    renderer, numbers = qwen3(TOKENIZER), count()
    store = EpisodeStore(renderer)

    async def open_one(wait_s: float) -> Opened:
        if (number := next(numbers)) > 1:
            raise BusyError("no sample waits")
        return Opened(store.open(f"open-{number}"), {"names": ["b", "a"]})

    settings = {"episodes": store, "open_episode": open_one, "keys": Keys(["operator"]), "any_model": True, **app}
    async with served(engine=engine, tokenizer=TOKENIZER, renderer=renderer, **settings) as inner:
        yield Stage(inner.router, inner.app, inner.engines, store)


def say(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], "max_tokens": 40}


async def said(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rollout_of(episode: Episode) -> Rollout:
    rollout = Rollout("g/0", "g", 0, None, advantage=1.0)
    episode.fill_in(rollout)
    return rollout


def trained(rollout: Rollout) -> list[list[int]]:
    return [
        [token for token, is_trained in zip(sample.token_ids, sample.loss_mask, strict=True) if is_trained]
        for sample in build_samples(RolloutGroup("g", None, [rollout]))
    ]


async def test_turns_of_all_protocols_form_one_rollout_of_sampled_tokens() -> None:
    async with stage() as it:
        episode = it.store.open("one")
        async with it.agent(episode) as agent:
            first = await said(agent, say("b a") | {"return_token_ids": True, "model": "gpt-4o"})
            second = await said(agent, say("b a", "B A", "more") | {"n": 2, "return_token_ids": True})
            text = await agent.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "return_token_ids": True})
            ids = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}, "request_id": "mine"}
            tokens = (await agent.post("/inference/v1/generate", json=ids)).json()["choices"][0]["token_ids"]
            again = {**ids, "token_ids": [5, 6, *tokens, 7], "request_id": "mine too"}
            more = (await agent.post("/inference/v1/generate", json=again)).json()["choices"][0]["token_ids"]
        episode.end()
        rollout = rollout_of(episode)
    assert rollout.status is RolloutStatus.COMPLETED
    (asked,) = first["choices"]
    one, other = (choice["token_ids"] for choice in second["choices"])
    texted = text.json()["choices"][0]["token_ids"]
    assert sorted(trained(rollout)) == sorted([[*asked["token_ids"], *one], other, texted, [*tokens, *more]])
    assert [message["content"] for message in rollout.messages if message["role"] == "assistant"][:1] == ["B A"]


async def test_n_counts_against_the_turn_limit() -> None:
    async with stage() as it:
        episode = it.store.open("one", max_turns=2)
        async with it.agent(episode) as agent:
            refused = await agent.post(CHAT, json=say("b a") | {"n": 3})
            assert (refused.status_code, episode.num_turns) == (400, 0)
            assert "2 of its 2 turns left" in refused.json()["error"]["message"]
            await said(agent, say("b a") | {"n": 2})
            assert (await agent.post(CHAT, json=say("b a"))).status_code == 410
    assert (episode.num_turns, episode.status) == (2, RolloutStatus.TRUNCATED_TURNS)


async def test_episode_key_grants_access_to_its_own_episode_only() -> None:
    async with stage() as it:
        mine, other = it.store.open("mine"), it.store.open("other")
        async with it.agent(mine) as agent, it.agent(mine, own_url=True) as at_home:
            assert (await at_home.post(CHAT, json=say("a"))).status_code == 200
            assert (await agent.get("/episodes/mine")).json()["num_turns"] == 1
            assert (await agent.get("/v1/models")).status_code == 200
            for method, path in (
                ("POST", "/episodes"),
                ("GET", "/metrics"),
                ("GET", "/episodes/other"),
                ("POST", "/episodes/other/reward"),
                ("POST", "/episodes/other/end"),
                ("POST", f"/episodes/other{CHAT}"),
                ("POST", "/episodes/"),
                ("POST", "/admin/pause"),
            ):
                assert (await agent.request(method, path, json={})).status_code == 401, path
        for key in ("operator", "episode-wrong", mine.key + "x", "é", ""):
            async with client_of(it.app) as stranger:
                headers = {b"x-api-key": key.encode()}
                assert (await stranger.get("/episodes/mine", headers=headers)).status_code == 401
                if key != "operator":
                    assert (await stranger.post(CHAT, json=say("a"), headers=headers)).status_code == 401
        assert (mine.num_turns, other.num_turns) == (1, 0)
        assert other.status is None


async def test_stored_response_is_private_to_its_episode() -> None:
    async with stage() as it:
        one, other = (it.agent(it.store.open(name)) for name in ("one", "other"))
        async with one, other:
            stored = (await one.post("/v1/responses", json={"input": "a"})).json()
            follow = {"input": "b", "previous_response_id": stored["id"]}
            assert (await one.post("/v1/responses", json=follow)).status_code == 200
            refused = await other.post("/v1/responses", json=follow)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


async def test_harness_opens_rewards_and_ends_an_episode() -> None:
    async with stage() as it, client_of(it.app, authorization="Bearer operator") as operator:
        opened = (await operator.post("/episodes", json={})).json()
        assert opened["sample"] == {"names": ["b", "a"]}
        url = opened["base_url"].removeprefix("http://policy")
        async with client_of(it.app, **{"x-api-key": opened["key"]}) as harness:
            asked = await said(harness, say("a") | {"n": 2})
            for body, status in (
                ({"rewards": {"solved": 1.0}}, 200),
                ({"rewards": {"neat": 0.5}, "completion_id": asked["id"], "index": 1}, 200),
                ({"rewards": {"neat": 0.5}, "completion_id": "chatcmpl-9"}, 404),
                ({"rewards": {"neat": "high"}}, 400),
            ):
                assert (await harness.post(f"{url}/reward", json=body)).status_code == status, body
            assert (await harness.post(f"{url}/end", json={"status": "done"})).status_code == 400
            ended = await harness.post(f"{url}/end", json={})
            assert (ended.status_code, ended.json()) == (200, {})
            assert (await harness.post(f"{url}/end", json={})).status_code == 410
            late = await harness.post(CHAT, json=say("a"))
            assert (late.status_code, late.json()["error"]["code"]) == (410, "episode_ended")
            assert (await harness.post(f"{url}/reward", json={"rewards": {"solved": 0.0}})).status_code == 410
        episode = it.store.find(opened["key"])
        assert episode is not None
        assert [turn.rewards for turn in rollout_of(episode).turns] == [{}, {"solved": 1.0, "neat": 0.5}]
        await operator.post("/episodes", json={})
        busy = await operator.post("/episodes", json={})
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")


async def test_end_of_episode_cancels_requests_in_flight() -> None:
    async with stage({**SPEAKING, "block_at_step": 0}) as it:
        episode = it.store.open("e")
        async with it.agent(episode) as agent:
            asking = asyncio.ensure_future(agent.post(CHAT, json=say("a")))
            await until(lambda: episode.num_in_flight == 1)
            episode.end(RolloutStatus.TRUNCATED_TIME)
            assert (await asking).status_code == 410
        assert it.app.exchanges.num_completions_running == 0


async def test_episode_can_have_its_own_policy() -> None:
    engines = Engines(1, **SPEAKING)
    async with stage() as it, engines.router() as router:
        episode = it.store.open("e", stream=uninterrupted(request_fn(router.generate)))
        async with it.agent(episode) as agent:
            await said(agent, say("a"))
            lines = [line async for line in (await agent.post(CHAT, json=say("a") | {"stream": True})).aiter_lines()]
        assert lines[-2] == "data: [DONE]"
        assert engines.engines[0].num_steps > 0
        assert all(engine.num_steps == 0 for engine in it.engines.engines)
