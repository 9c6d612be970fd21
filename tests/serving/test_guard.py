"""Checks of requests before an endpoint sees them, and the server's own endpoints."""

from __future__ import annotations

import asyncio
import gzip
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from background import HANG_S
from served import client_of, served

from titan_rl.core.errors import ConfigError
from titan_rl.generation.continuation import request_fn
from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.serving.api_keys import Keys
from titan_rl.serving.app import make_app
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import serve
from titan_rl.types import Completion
from titan_rl.weights.types import PublishedWeights

GENERATE = "/inference/v1/generate"
ASK = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}


async def nobody(*_: Any, **__: Any) -> Completion:
    raise RuntimeError("secret /root/of/the/matter")


def app(**settings: Any) -> Any:
    return make_app(request_fn(nobody), model="policy", max_context=16, **settings)


async def test_keys_grant_access_by_role() -> None:
    async with served(keys=Keys(["one", "two"], admin="root")) as stage:
        stage.app = make_app(
            stage.router.stream,
            model="policy",
            max_context=64,
            keys=Keys(["one", "two"], admin="root"),
            control=stage.router,
        )
        async with client_of(stage.app) as client:

            async def status(path: str, body: Any, **headers: str) -> int:
                return (await client.post(path, json=body, headers=headers)).status_code

            assert (await client.get("/health")).status_code == 200
            for path in ("/metrics", "/v1/models", "/nowhere"):
                assert (await client.get(path)).status_code == 401
            assert await status(GENERATE, ASK) == 401
            assert await status(GENERATE, ASK, authorization="Bearer wrong") == 401
            assert await status(GENERATE, ASK, authorization="Bearer root") == 401
            assert await status(GENERATE, ASK, authorization="Bearer two") == 200
            assert await status(GENERATE, ASK, **{"x-api-key": "one"}) == 200
            assert await status("/admin/pause", {}, authorization="Bearer one") == 401
            root = {"authorization": "Bearer root"}
            assert await status("/admin/pull", {"version": 3}, **root) == 204
            assert await status("/admin/pause", {"mode": "wait"}, **root) == 204
            assert stage.router.paused == "wait"
            assert await status("/admin/pause", {}, **root) == 409
            assert await status("/admin/resume", {}, **root) == 204
            assert await status("/admin/abort", {}, **root) == 204
            assert await status("/admin/pause", {"mode": "hard"}, **root) == 400
            assert stage.router.version == 3


@pytest.mark.parametrize(("version", "status"), [(3, 409), (-1, 400), (10**30, 400)])
async def test_pull_of_an_unpublished_version_is_rejected(version: int, status: int) -> None:
    async with served() as stage:
        published = PublishedWeights()
        for index, loop in enumerate(stage.engines.loops):
            stage.router.remove_replica(f"engine-{index}")
            await stage.router.add_replica(LocalReplica(f"engine-{index}", loop, published.manifest_of))  # pyright: ignore[reportArgumentType]
        app = make_app(
            stage.router.stream, model="policy", max_context=64, keys=Keys(admin="root"), control=stage.router
        )
        async with client_of(app) as client:
            root = {"authorization": "Bearer root"}
            answer = await client.post("/admin/pull", json={"version": version}, headers=root)
            assert answer.status_code == status
            assert answer.json()["error"]["param"] == "version"
            if status == 409:
                assert "version 3 is not published; no version is" in answer.json()["error"]["message"]
            assert (await client.post(GENERATE, json=ASK)).status_code == 200
            assert all(replica.serving for replica in stage.router.replicas)


@pytest.mark.parametrize(("field", "value"), [("temperature", 2.5), ("min_tokens", 5)])
async def test_invalid_sampling_value_error_names_the_field(field: str, value: float) -> None:
    async with served() as stage, client_of(stage.app) as client:
        response = await client.post(GENERATE, json={**ASK, "sampling_params": {"max_tokens": 2, field: value}})
        assert (response.status_code, response.json()["error"]["param"].rpartition(".")[2]) == (400, field)


async def test_health_reports_unavailability_with_its_reason() -> None:
    async with served(count=1) as stage:
        app = make_app(stage.router.stream, model="policy", max_context=64, trouble=stage.router.trouble)
        async with client_of(app) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            await stage.router.pull_state_dict(1)
            stage.router.remove_replica("engine-0")
            ill = await client.get("/health")
            assert (ill.status_code, ill.json()["reason"]) == (503, "there are no generators")
            await stage.router.add_replica(LocalReplica("a", EngineLoop(ScriptedEngine), lambda version: []))
            ill = await client.get("/health")
            assert (ill.status_code, ill.json()["reason"]) == (503, "none of 1 generators is in service")
            await stage.router.close()
            assert (await client.get("/health")).json()["reason"] == "it is closed"


async def test_admin_calls_are_disabled_without_an_admin_key() -> None:
    async with served() as stage:
        stage.app = make_app(stage.router.stream, model="policy", max_context=64, control=stage.router)
        async with client_of(stage.app, authorization="Bearer ") as client:
            assert (await client.post("/admin/pause", json={})).status_code == 401
        assert stage.router.paused is None


@pytest.mark.parametrize(
    "keys", [{"api": [""]}, {"api": ["a b"]}, {"api": ["ä"]}, {"api": ["\udce9"]}, {"api": ["a"], "admin": "a"}]
)
def test_rejects_unusable_keys(keys: Any) -> None:
    with pytest.raises(ConfigError, match="key"):
        Keys(**keys)


def test_repr_does_not_show_keys() -> None:
    assert repr(Keys(["hush"], admin="quiet")) == "Keys(1 of clients, an admin key)"


async def test_keys_never_appear_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1)
    keys = Keys(["of-a-client"], admin="of-an-admin")
    async with serve(app(keys=keys)) as url, httpx.AsyncClient(base_url=url) as client:
        for key in ("of-a-client", "of-an-admin", "of-nobody"):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                await client.post(GENERATE, json=ASK, headers=headers)  # an internal error
                await client.post("/admin/pause", json={}, headers=headers)
                await client.get(f"/v1/models?api_key={key}", headers=headers)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST / HTTP/1.1\r\nauthorization: Bearer of-a-client\r\n\x00: \r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
    messages = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert any("failed" in message for message in messages)
    assert not any(f"of-{who}" in message for message in messages for who in ("a-client", "an-admin", "nobody"))


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://elsewhere.org", 403),
        ("http://localhost.elsewhere.org:8000", 403),
        ("null", 403),
        ("http://localhost:3000", 500),
        ("http://127.0.0.1", 500),
        ("http://[::1]:80", 500),
    ],
)
async def test_rejects_requests_of_foreign_origins(origin: str, status: int) -> None:
    """Origins other than this machine are refused, even if their name now resolves to this machine."""
    async with client_of(app()) as client:
        assert (await client.post(GENERATE, json=ASK, headers={"origin": origin})).status_code == status


@pytest.mark.parametrize(
    ("host", "keyed", "status"),
    [
        ("elsewhere.org", False, 403),
        ("localhost.elsewhere.org:8000", False, 403),
        ("", False, 403),
        ("localhost:8000", False, 200),
        ("[::1]:8000", False, 200),
        ("elsewhere.org", True, 200),
    ],
)
async def test_rejects_foreign_host_headers_against_dns_rebinding(host: str, keyed: bool, status: int) -> None:
    keys = Keys(["of-a-client"] if keyed else [])
    async with serve(app(keys=keys), host="127.0.0.1", port=0) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/health"):
            headers = {"host": host, "authorization": "Bearer of-a-client"}
            assert (await client.get(path, headers=headers)).status_code == status, path


async def test_listening_beyond_localhost_requires_a_key() -> None:
    with pytest.raises(ConfigError, match="no key"):
        async with serve(app(), host="0.0.0.0"):
            raise AssertionError("served")
    async with serve(app(keys=Keys(["one"])), host="0.0.0.0") as url, httpx.AsyncClient() as client:
        assert (await client.get(url + "/health")).status_code == 200


async def test_port_in_use_error_names_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            async with serve(app(), port=port):
                raise AssertionError("served")


async def test_rejects_an_oversized_body() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1000

    async with client_of(app(limits=ServerLimits(body_bytes=10_000))) as client:
        headers = {"content-type": "application/json"}
        assert (await client.post(GENERATE, content=b"[" * 10_001, headers=headers)).status_code == 413
        assert (await client.post(GENERATE, content=endless(), headers=headers)).status_code == 413


async def test_missing_body_times_out() -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with client_of(app(limits=ServerLimits(body_s=0.05))) as client:
        answer = await client.post(GENERATE, content=stuck(), headers={"content-type": "application/json"})
        assert answer.status_code == 408


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json; charset=utf-8", 400),
        (b"\xff", "application/json", 400),
        (b'{"token_ids": [1], "model": "\\ud800"}', "application/json", 400),
        (b"[" * 5000, "application/json", 400),
        (b'{"token_ids": [1e400]}', "application/json", 400),
        (b"{}", "text/plain", 415),
    ],
)
async def test_rejects_malformed_requests(content: bytes, kind: str, status: int) -> None:
    async with client_of(app()) as client:
        answer = await client.post(GENERATE, content=content, headers={"content-type": kind})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_rejects_a_compressed_body() -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with client_of(app()) as client:
        answer = await client.post(GENERATE, content=gzip.compress(b'{"token_ids": [1]}'), headers=headers)
    assert (answer.status_code, "compressed" in answer.text) == (415, True)


async def test_unknown_paths_methods_and_models() -> None:
    async with client_of(app()) as client:
        assert (await client.get("/v1/nothing")).status_code == 404
        assert (await client.get(GENERATE)).status_code == 405
        assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
        assert (await client.get("/v1/models/policy")).json()["max_model_len"] == 16
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"]) == ("policy", "model")


async def test_internal_errors_do_not_leak_details() -> None:
    async with client_of(app()) as client:
        answer = await client.post(GENERATE, json=ASK)
    assert answer.status_code == 500
    assert "secret" not in answer.text


async def test_metrics_count_responses_and_tokens() -> None:
    async with served() as stage, client_of(stage.app) as client:
        await client.post(GENERATE, json=ASK)
        await client.get("/v1/models/other")
        lines = (await client.get("/metrics")).text.splitlines()
    assert f'titan_rl_responses_total{{path="{GENERATE}",status="200"}} 1.0' in lines
    assert 'titan_rl_responses_total{path="other",status="404"} 1.0' in lines
    assert "titan_rl_completion_tokens_total 2.0" in lines
    assert "titan_rl_completions_running 0.0" in lines
    assert "titan_rl_time_to_first_token_seconds_count 1.0" in lines


async def test_unknown_path_error_lists_the_known_paths() -> None:
    async with served() as stage, client_of(stage.app) as client:
        answer = await client.post("/v1/v1/chat/completions", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")
    assert "/v1/chat/completions, " in answer.json()["error"]["message"]


def test_serving_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'torchtitan', 'monarch', 'transformers'): sys.modules[name] = None\n"
        "import titan_rl.serving.server, titan_rl.serving.client"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_port_is_released_on_error_and_cancellation(cancelled: bool) -> None:
    inside, urls = asyncio.Event(), list[str]()

    async def run() -> None:
        async with serve(stage.app) as url:
            urls.append(url)
            inside.set()
            if not cancelled:
                raise ConfigError("of the block's own")
            await asyncio.Event().wait()

    async with served() as stage:
        block = asyncio.create_task(run())
        await inside.wait()
        if cancelled:
            block.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else ConfigError):
            await block
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{urls[0]}/health")


def test_rejects_a_string_as_the_list_of_keys() -> None:
    with pytest.raises(ConfigError, match="list of keys"):
        Keys(api="secret")


@pytest.mark.parametrize(("version", "status"), [("1.0", 200), ("1.1", 400)])
async def test_host_header_is_optional_in_http_1_0_only(version: str, status: int) -> None:
    """HTTP/1.0, which some health checks use, has no Host header. HTTP/1.1 requires one."""
    async with serve(app()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(f"GET /v1/models HTTP/{version}\r\nConnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), HANG_S)
        writer.close()
    assert int(answer.split()[1]) == status
    assert status == 200 or b"Host header" in answer


async def test_request_id_appears_in_the_response_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as stage, client_of(stage.app) as client:
        given = {"x-request-id": "mine-17"}
        for path, body in ((GENERATE, ASK), (GENERATE, {**ASK, "stream": True}), (GENERATE, {}), ("/nowhere", {})):
            assert (await client.post(path, json=body, headers=given)).headers["x-request-id"] == "mine-17"
        made = [(await client.get("/health", headers={"x-request-id": bad})).headers for bad in ("", "a b", "x" * 200)]
        assert len({headers["x-request-id"] for headers in made}) == 3
        headers = (await client.post("/v1/messages", json={}, headers=given)).headers
        assert (headers["request-id"], headers["x-request-id"]) == ("mine-17", "mine-17")
    async with client_of(app()) as client:
        answer = await client.post(GENERATE, json=ASK, headers=given)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine-17")
    assert "request mine-17 failed" in caplog.text
