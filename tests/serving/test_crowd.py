"""Many concurrent clients and random requests: every answer is right or an error, and every slot is released."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_model import VOCAB, byte_tokenizer
from depth import DEEP, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import client_of, served

from titan_rl.generation.scripted_engine import CostModel
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import serve
from titan_rl.types import SamplingParams

GENERATE = "/inference/v1/generate"
CLIENTS = 24
LENGTH = 24
STEP = CostModel(step=0.004)  # slow enough that pulls and pauses happen between steps
TOKENIZER = byte_tokenizer()

BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}},
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
}


async def streamed(client: httpx.AsyncClient, url: str, prompt: list[int]) -> list[int]:
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": LENGTH}, "stream": True}
    token_ids: list[int] = []
    async with client.stream("POST", url + GENERATE, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    token_ids += choice["token_ids"]
    return token_ids


async def test_streams_are_correct_during_weight_pulls_and_pauses() -> None:
    limits = httpx.Limits(max_connections=CLIENTS)
    async with (
        served(engine={"max_running": 8, "cost": STEP}) as stage,
        serve(stage.app) as url,
        httpx.AsyncClient(limits=limits, timeout=300) as client,
    ):
        streams = asyncio.gather(*(streamed(client, url, [number, 1]) for number in range(CLIENTS)))
        version = 0
        while stage.app.exchanges.num_completions_running == 0:  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0)
        while not streams.done():
            version += 1
            await stage.router.pull_state_dict(version)
            await stage.router.pause(("wait", "keep", "abort", "keep", "abort")[version % 5])
            await stage.router.resume()
        for number, token_ids in enumerate(await streams):
            own = await stage.router.generate(
                [number, 1], request_id=f"own-{number}", sampling=SamplingParams(max_tokens=LENGTH)
            )
            assert token_ids == own.token_ids
        assert version > 2
        assert stage.app.exchanges.num_completions_running == 0


@pytest.mark.skipif(not DEEP, reason="a thousand clients take half a minute")
def test_thousand_streams_from_a_server_process(tmp_path: Path) -> None:
    """During pauses and weight pulls, each stream is complete and right, and memory does not grow."""
    from benchmarks.serving_sessions import measure

    growth = asyncio.run(measure(1000, 3, tmp_path))
    assert growth < 1.2


def fields() -> list[str]:
    from titan_rl.serving.protocols.management import openapi

    schemas = openapi(tuple(BODIES), with_keys=False)["components"]["schemas"].values()
    return sorted({name for schema in schemas for name in schema.get("properties", {})})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(BODIES)),
            st.dictionaries(st.sampled_from(fields()) | st.text(max_size=8), json_values, max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_request_causes_a_server_error(asked: list[tuple[str, dict[str, Any]]]) -> None:
    async def all_of_them() -> None:
        async with (
            served(
                engine={"vocab_size": VOCAB},
                count=1,
                tokenizer=TOKENIZER,
                renderer=RENDERER,
                limits=ServerLimits(request_s=20.0),
            ) as stage,
            client_of(stage.app) as client,
        ):
            answers = await asyncio.gather(
                *(client.post(path, json={**BODIES[path], **change}) for path, change in asked)
            )
            for answer in answers:
                assert answer.status_code in (200, 400, 404), answer.text
                if answer.status_code != 200:
                    assert isinstance(answer.json()["error"]["message"], str)
            assert stage.app.exchanges.num_completions_running == 0
            assert not any(replica.num_requests for replica in stage.router.replicas)

    asyncio.run(all_of_them())


RENDERER = ChatTemplateRenderer(TOKENIZER)
