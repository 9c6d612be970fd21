"""Random requests, valid and invalid according to the OpenAPI description: each gets a described response."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests
import schemathesis
from background import HANG_S
from byte_model import qwen3
from clients import TOKENIZER, chat_server
from depth import DEEP
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from served import Served

from titan_rl.serving.api_keys import Keys
from titan_rl.serving.app import PolicyApp, make_app
from titan_rl.serving.episode_store import EpisodeStore, Opened
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import serve

LIMITS = ServerLimits(request_s=20.0, num_choices=3)
ADMIN_KEY = "of-the-admin"
CONTEXT = 768
ENGINE: dict[str, Any] = {"script": None, "mean_tokens": 6, "max_context": CONTEXT}
ERRORS = ("OpenAIError", "AnthropicError")
ALL_HEALTH_CHECKS: Any = list(HealthCheck)  # its metaclass hides the type of the members
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@contextmanager
def serving(app_of: Callable[[Served], PolicyApp] = lambda stage: stage.app) -> Iterator[tuple[str, Served]]:
    """Serve in a separate thread, for blocking clients."""
    started: list[tuple[str, Served]] = []
    ready, over = threading.Event(), threading.Event()

    async def run() -> None:
        async with (
            chat_server(qwen3(TOKENIZER), engine=ENGINE, max_context=CONTEXT, limits=LIMITS, any_model=True) as stage,
            serve(app_of(stage)) as url,
        ):
            started.append((url, stage))
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(20)
    try:
        yield started[0]
    finally:
        over.set()
        thread.join(20)


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[str, Served]]:
    with serving() as running:
        yield running


def test_openapi_describes_every_response(stage: tuple[str, Served]) -> None:
    url, served = stage
    description = requests.get(f"{url}/openapi.json", timeout=120).json()
    schema = schemathesis.openapi.from_dict(description)
    operations = [found.ok() for found in schema.get_all_operations()]  # pyright: ignore[reportAttributeAccessIssue]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for operation in operations for mode in MODES])
    errors = {
        name: Draft202012Validator(description["components"]["schemas"][name])
        for name in ("OpenAIError", "AnthropicError")
    }
    session = requests.Session()
    seen: set[tuple[str, int]] = set()

    @settings(max_examples=4000 if DEEP else 60, suppress_health_check=ALL_HEALTH_CHECKS, database=None)
    @given(cases)
    def answered(case: schemathesis.Case) -> None:
        answer = case.call(base_url=url, session=session, timeout=120)
        seen.add((case.operation.path, answer.status_code))
        assert answer.status_code in (200, 400, 404, 405, 413, 415), answer.text
        if answer.status_code != 200:
            errors[ERRORS[case.operation.path.startswith("/v1/messages")]].validate(answer.json())

    answered()
    generating = [operation.path for operation in operations if operation.method == "post"]
    assert not DEEP or all((path, 200) in seen for path in generating), seen
    wait_until(lambda: served.app.exchanges.num_completions_running == 0)
    wait_until(lambda: not any(replica.num_requests for replica in served.router.replicas))


def governed(stage: Served) -> PolicyApp:
    """Application with admin calls, and an episode for every client that requests one."""
    store, numbers = EpisodeStore(qwen3(TOKENIZER)), itertools.count()

    async def open_one(wait_s: float) -> Opened:
        return Opened(store.open(f"e{next(numbers)}"))

    return make_app(
        stage.router.stream,
        model="policy",
        max_context=CONTEXT,
        keys=Keys(admin=ADMIN_KEY),
        limits=LIMITS,
        control=stage.router,
        episodes=store,
        open_episode=open_one,
    )


def test_openapi_describes_admin_and_episode_responses() -> None:
    session = requests.Session()
    with serving(governed) as (url, _):
        description = requests.get(f"{url}/openapi.json", timeout=120).json()
        schema = schemathesis.openapi.from_dict(description).include(path_regex="^/(admin|episodes)")
        operations = [found.ok() for found in schema.get_all_operations()]  # pyright: ignore[reportAttributeAccessIssue]
        cases = st.one_of([operation.as_strategy(generation_mode=mode) for operation in operations for mode in MODES])
        error = Draft202012Validator(description["components"]["schemas"]["OpenAIError"])
        seen: set[tuple[str, int]] = set()

        @settings(max_examples=2000 if DEEP else 40, suppress_health_check=ALL_HEALTH_CHECKS, database=None)
        @given(cases, st.booleans())
        def answered(case: schemathesis.Case, has_key: bool) -> None:
            key = ADMIN_KEY
            if "id" in case.path_parameters:
                opened = session.post(f"{url}/episodes", json={}, timeout=120).json()
                key = opened["key"]
                if has_key:
                    case.path_parameters["id"] = opened["id"]
            case.headers["authorization"] = f"Bearer {key if has_key else 'another'}"
            answer = case.call(base_url=url, session=session, timeout=120)
            seen.add((case.operation.path, answer.status_code))
            assert answer.status_code in (200, 204, 400, 401, 404, 405, 409, 413, 415), answer.text
            if answer.status_code >= 400:
                error.validate(answer.json())

        answered()
        assert len(operations) == 8
        assert not DEEP or {path for path, status in seen if status in (200, 204)} == {one.path for one in operations}
        assert requests.get(f"{url}/health", timeout=120).status_code == 200


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition: a client gets its answer slightly before the server has finished the request."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_openapi_schemas_match_the_validated_models(stage: tuple[str, Served]) -> None:
    description = requests.get(f"{stage[0]}/openapi.json", timeout=120).json()
    schemas = description["components"]["schemas"]
    assert {"/v1/responses", "/v1/messages/count_tokens", "/v1/models/{name}", "/health"} <= set(description["paths"])
    for name, required in (("ChatBody", ["messages"]), ("MessagesBody", ["messages", "max_tokens"])):
        assert schemas[name]["required"] == required
        assert schemas[name]["additionalProperties"] is False
