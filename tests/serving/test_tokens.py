"""`/inference/v1/generate` and `HttpGenerateFn`: the same tokens as without HTTP, also across pauses and failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from served import CONTEXT, Served, client_of, served, until

from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.generation.continuation import request_fn
from titan_rl.serving.app import make_app
from titan_rl.serving.client import HttpGenerateFn
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import serve
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

PATH = "/inference/v1/generate"


def body(max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": max_tokens, "logprobs": 0}, **more}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def direct(stage: Served, max_tokens: int = 8) -> Completion:
    return await stage.router.generate([1, 2, 3], request_id="direct", sampling=SamplingParams(max_tokens))


async def test_http_generate_fn_equals_direct_generation() -> None:
    async with served() as stage, HttpGenerateFn("http://policy/v1", transport=httpx.ASGITransport(stage.app)) as ask:
        stops = (5, 6, 7, 8)
        for sampling in (SamplingParams(9), SamplingParams(200, stop_token_ids=stops), SamplingParams(9, seed=4)):
            theirs = await ask([1, 2, 3], request_id="r", session_id="s", sampling=sampling)
            own = await stage.router.generate([1, 2, 3], request_id="r", sampling=sampling)
            assert (theirs.request_id, theirs.finish_reason) == ("r", own.finish_reason)
            assert (theirs.token_ids, theirs.logprobs) == (own.token_ids, own.logprobs)
            assert tuple(theirs.version_spans) == tuple(own.version_spans)


@pytest.mark.parametrize("top_k", [0, 3])
async def test_prompt_logprobs_over_http_equal_direct_ones(top_k: int) -> None:
    async with served() as stage, HttpGenerateFn("http://policy/v1", transport=httpx.ASGITransport(stage.app)) as ask:
        sampling, prompt = SamplingParams(1, prompt_logprobs=top_k), [1, 2, 3, 9]
        theirs = (await ask(prompt, request_id="r", sampling=sampling)).prompt_scores
        own = (await stage.router.generate(prompt, request_id="r", sampling=sampling)).prompt_scores
        assert theirs is not None
        assert own is not None
        assert theirs.logprobs == pytest.approx(own.logprobs)
        assert (theirs.top_k, theirs.top_ids) == (top_k, own.top_ids)
        assert list(theirs.top_logprobs) == pytest.approx(list(own.top_logprobs))
        assert (await ask(prompt, request_id="r", sampling=SamplingParams(1))).prompt_scores is None


@pytest.mark.parametrize("more", [{"stream": True}, {"n": 2}])
async def test_prompt_logprobs_reject_streams_and_several_choices(more: dict[str, Any]) -> None:
    async with served() as stage, client_of(stage.app) as client:
        sampling = {"max_tokens": 1, "prompt_logprobs": 1, **({"n": more["n"]} if "n" in more else {})}
        answer = await client.post(
            PATH, json={"token_ids": [1, 2], "sampling_params": sampling, "stream": "stream" in more}
        )
        assert answer.status_code == 400
        assert "prompt_logprobs require a single answer without streaming" in answer.text


async def test_renderers_package_client() -> None:
    client = pytest.importorskip("renderers.client")
    openai = pytest.importorskip("openai")

    class Parsed:
        content, reasoning_content, tool_calls, reasoning_complete = "said", None, (), True

    class Renderer:
        supports_tools = True

        def get_stop_token_ids(self) -> list[int]:
            return [5]

        def parse_response(self, token_ids: list[int], **_: Any) -> Parsed:
            return Parsed()

    async with served() as stage, serve(stage.app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
            answer = await client.generate(
                client=api,
                renderer=Renderer(),
                messages=[],
                model="policy",
                prompt_ids=[1, 2, 3],
                sampling_params={"max_tokens": 6, "temperature": 1.0, "routed_experts_prompt_start": 2},
            )
            with pytest.raises(client.OverlongPromptError):
                await client.generate(
                    client=api, renderer=Renderer(), messages=[], model="policy", prompt_ids=[1] * (CONTEXT + 1)
                )
        own = await stage.router.generate([1, 2, 3], request_id="own", sampling=SamplingParams(6, stop_token_ids=(5,)))
    assert answer["completion_ids"] == own.token_ids
    assert answer["completion_logprobs"] == own.logprobs


async def test_streamed_tokens_equal_direct_ones() -> None:
    async with served() as stage, client_of(stage.app) as client:
        request = body(20, stream=True, return_token_ids=True, stream_options={"include_usage": True})
        answer = await client.post(PATH, json=request)
        own = await direct(stage, 20)
    *parts, end, use = events(answer.text)
    assert len(parts) > 1
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == own.token_ids
    content = [entry for part in parts for entry in part["choices"][0]["logprobs"]["content"]]
    assert [entry["logprob"] for entry in content] == own.logprobs
    assert [part["prompt_token_ids"] for part in parts] == [[1, 2, 3], *[None] * (len(parts) - 1)]
    assert end["choices"][0]["finish_reason"] == "length"
    assert end["choices"][0]["weight_versions"] == [{"version": "0", "start": 0, "end": 20}]
    assert use["usage"]["total_tokens"] == 23


async def test_each_choice_has_its_own_seed() -> None:
    seeds: list[int | None] = []

    async def generate(prompt_token_ids: Any, *, sampling: SamplingParams, request_id: str, **_: Any) -> Completion:
        seeds.append(sampling.seed)
        return Completion(request_id, [sampling.seed or 0], [-1.0], FinishReason.STOP, (VersionSpan(3, 1),))

    async with client_of(make_app(request_fn(generate), model="policy", max_context=16)) as client:
        asked = {"n": 3, "seed": 10, "max_tokens": 2}
        answer = (await client.post(PATH, json={"token_ids": [1], "sampling_params": asked})).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[10], [11], [12]]
    assert answer["choices"][2]["weight_versions"] == [{"version": "3", "start": 0, "end": 1}]
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids[1]"),
        ({"token_ids": [1] * CONTEXT}, "token_ids"),
        ({"features": {}}, "features"),
        ({"output_mode": "text"}, "output_mode"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"bad_words": ["x"]}}, "sampling_params.bad_words"),
        ({"sampling_params": {"frequency_penalty": 2.5}}, "sampling_params.frequency_penalty"),
        ({"sampling_params": {"n": 1000}}, "sampling_params.n"),
        ({"sampling_params": {"min_tokens": 4, "max_tokens": 2}}, "min_tokens"),
    ],
)
async def test_rejects_invalid_fields_by_name(change: dict[str, Any], param: str | None) -> None:
    async with served() as stage, client_of(stage.app) as client:
        answer = await client.post(PATH, json={**body(), **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")


async def test_stream_continues_after_a_pause_and_a_weight_pull() -> None:
    async with served(engine={"block_at_step": 4}, count=1) as stage, client_of(stage.app) as client:
        (engine,) = stage.engines.engines
        asked = asyncio.create_task(client.post(PATH, json=body(30, stream=True)))
        await asyncio.to_thread(engine.started.wait, 20)
        pausing = asyncio.create_task(stage.router.pause("keep"))
        await until(lambda: stage.engines.loops[0].paused == "keep")
        engine.release.set()
        await pausing
        steps = engine.num_steps
        await stage.router.pull_state_dict(1)
        assert not asked.done()
        assert engine.num_steps == steps
        await stage.router.resume()
        answer = events((await asked).text)
        own = await direct(stage, 30)
    tokens = [token for part in answer for token in part["choices"][0]["token_ids"]]
    assert tokens == own.token_ids  # they do not depend on the version
    first, second = answer[-1]["choices"][0]["weight_versions"]
    assert (first["version"], first["start"]) == ("0", 0)
    assert (second["version"], second["start"], second["end"]) == ("1", first["end"], 30)


async def test_abort_is_invisible_to_the_client() -> None:
    async with served(engine={"block_at_step": 4}, count=1) as stage, client_of(stage.app) as client:
        (engine,) = stage.engines.engines
        asked = asyncio.create_task(client.post(PATH, json=body(30, stream=True)))
        await asyncio.to_thread(engine.started.wait, 20)
        pausing = asyncio.create_task(stage.router.pause("abort"))
        await until(lambda: stage.router.paused == "abort")
        engine.release.set()
        await pausing
        assert not asked.done()
        await stage.router.resume()
        answer = events((await asked).text)
        own = await direct(stage, 30)
    assert [token for part in answer for token in part["choices"][0]["token_ids"]] == own.token_ids
    assert answer[-1]["choices"][0]["finish_reason"] == "length"


async def test_engine_failure_mid_stream_is_invisible_to_the_client() -> None:
    async with served(engine={"block_at_step": 6}) as stage, client_of(stage.app) as client:
        asked = asyncio.create_task(client.post(PATH, json=body(30, stream=True)))
        await until(lambda: any(engine.started.is_set() for engine in stage.engines.engines))
        hit = next(engine for engine in stage.engines.engines if engine.started.is_set())

        def fail() -> list[Any]:
            raise RuntimeError("killed")

        hit.step = fail  # ty: ignore
        for engine in stage.engines.engines:
            engine.release.set()
        answer = events((await asked).text)
        own = await direct(stage, 30)
    assert [token for part in answer for token in part["choices"][0]["token_ids"]] == own.token_ids


async def test_slots_are_limited_and_released() -> None:
    limits = ServerLimits(num_places=2, request_s=30.0)
    async with served(engine={"block_at_step": 2}, count=1, limits=limits) as stage, client_of(stage.app) as client:
        (engine,) = stage.engines.engines
        asked = [asyncio.create_task(client.post(PATH, json=body())) for _ in range(2)]
        await until(lambda: stage.app.exchanges.num_completions_running == 2)
        answer = await client.post(PATH, json=body())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        engine.release.set()
        assert [(await one).status_code for one in asked] == [200, 200]
        assert stage.app.exchanges.num_completions_running == 0
        assert (await client.post(PATH, json=body())).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_request_timeout_is_a_504(stream: bool) -> None:
    limits = ServerLimits(request_s=0.05)
    async with served(engine={"block_at_step": 1}, count=1, limits=limits) as stage, client_of(stage.app) as client:
        answer = await client.post(PATH, json=body(stream=stream))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert stage.app.exchanges.num_completions_running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnected_client_frees_its_slot(stream: bool) -> None:
    async with served(engine={"block_at_step": 3}, count=1) as stage, serve(stage.app) as url:
        (engine,) = stage.engines.engines
        async with httpx.AsyncClient() as client:
            asked = asyncio.create_task(client.post(url + PATH, json=body(400, stream=stream)))
            await asyncio.to_thread(engine.started.wait, 20)
            assert stage.app.exchanges.num_completions_running == 1
            asked.cancel()
            await asyncio.wait([asked])
        await until(lambda: stage.app.exchanges.num_completions_running == 0)
        engine.release.set()
        await until(lambda: not any(replica.num_requests for replica in stage.router.replicas))
        assert engine.num_steps < 400


async def test_shutdown_answers_requests_in_flight() -> None:
    async with served(engine={"block_at_step": 1}, count=1) as stage, httpx.AsyncClient() as client:
        async with serve(stage.app) as url:
            asked = asyncio.create_task(client.post(url + PATH, json=body()))
            await until(lambda: stage.app.exchanges.num_completions_running == 1)
        assert (await asked).status_code == 503
        with pytest.raises(httpx.ConnectError):
            await client.get(url + "/health")


async def test_server_errors_map_to_exception_types() -> None:
    async with served() as stage:
        transport = httpx.ASGITransport(stage.app)
        async with HttpGenerateFn("http://policy", transport=transport, model="another") as ask:
            with pytest.raises(RequestError, match="no model of this name"):
                await ask([1], request_id="r", sampling=SamplingParams(2))
        async with HttpGenerateFn("http://policy", transport=transport) as ask:
            with pytest.raises(RequestError, match="context"):
                await ask([1] * CONTEXT, request_id="r", sampling=SamplingParams(2))
        await stage.router.close()
        async with HttpGenerateFn("http://policy", transport=transport) as ask:
            with pytest.raises(GenerationError, match="503"):
                await ask([1], request_id="r", sampling=SamplingParams(2))


async def test_retries_connection_errors_only() -> None:
    answers: list[Any] = [httpx.ConnectError("refused"), httpx.ReadError("reset"), 503]
    asked: list[bytes] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.content)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer, json={"error": {"message": "not now"}})

    async with HttpGenerateFn("http://policy", transport=httpx.MockTransport(handle)) as ask:
        with pytest.raises(GenerationError, match="503: not now"):
            await ask([1], request_id="r", sampling=SamplingParams(2))
    assert len(asked) == 3
    assert len(set(asked)) == 1
    assert not answers


async def test_waits_for_a_full_server_until_the_timeout() -> None:
    limits = ServerLimits(num_places=1, request_s=30.0)
    async with served(engine={"block_at_step": 2}, count=1, limits=limits) as stage:
        (engine,) = stage.engines.engines
        transport = httpx.ASGITransport(stage.app)
        async with HttpGenerateFn("http://policy", transport=transport) as ask:
            first = asyncio.create_task(ask([1], request_id="first", sampling=SamplingParams(2)))
            await until(lambda: stage.app.exchanges.num_completions_running == 1)
            async with HttpGenerateFn("http://policy", transport=transport, timeout_s=0.05) as hurried:
                with pytest.raises(GenerationError, match="429: the server has 0 free places"):
                    await hurried([1], request_id="hurried", sampling=SamplingParams(2))
            second = asyncio.create_task(ask([1], request_id="second", sampling=SamplingParams(2)))
            engine.release.set()
            assert (await first).token_ids == (await second).token_ids


async def test_429_without_retry_after_is_not_retried() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(429, json={}))
    async with HttpGenerateFn("http://policy", transport=transport) as ask:
        with pytest.raises(GenerationError, match="429"):
            await ask([1], request_id="r", sampling=SamplingParams(2))


async def test_non_numeric_weight_versions_become_the_clients_version() -> None:
    choice = {
        "token_ids": [7, 8],
        "logprobs": {"content": [{"token_id": 7, "logprob": -1.0}, {"token_id": 8, "logprob": -2.0}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "default", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"choices": [choice]}))
    async with HttpGenerateFn("http://policy", transport=transport, version=3) as ask:
        completion = await ask([1], request_id="r", sampling=SamplingParams(2))
    assert tuple(completion.version_spans) == (VersionSpan(3, 1), VersionSpan(4, 1))


async def test_cancelled_call_frees_the_server_slot() -> None:
    async with served(engine={"block_at_step": 2}, count=1) as stage, serve(stage.app) as url:
        (engine,) = stage.engines.engines
        async with HttpGenerateFn(url) as ask:
            asked = asyncio.create_task(ask([1], request_id="r", sampling=SamplingParams(400)))
            await asyncio.to_thread(engine.started.wait, 20)
            asked.cancel()
            await asyncio.wait([asked])
            await until(lambda: stage.app.exchanges.num_completions_running == 0)
        engine.release.set()
        await until(lambda: not any(replica.num_requests for replica in stage.router.replicas))
        assert engine.num_steps < 400
