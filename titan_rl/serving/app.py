"""The ASGI application that serves a policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from titan_rl.generation.continuation import RequestFn
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.serving.api_keys import Admission, Keys
from titan_rl.serving.conversations.caller import Conversations
from titan_rl.serving.conversations.turn import Turns
from titan_rl.serving.episode_store import EpisodeStore, Open, Opened, episode_routes
from titan_rl.serving.http.errors import ApiError
from titan_rl.serving.http.exchange import Exchanges, ServerLimits, ServerMetrics
from titan_rl.serving.http.request import BodyReading, RequestMiddleware
from titan_rl.serving.policy import ServedPolicy, Versions, uninterrupted
from titan_rl.serving.protocols.anthropic import ANTHROPIC, Threads, answer_count_tokens, answer_messages
from titan_rl.serving.protocols.management import Control, admin_routes, openapi, status_routes
from titan_rl.serving.protocols.openai.chat import answer_chat
from titan_rl.serving.protocols.openai.completions import answer_completions
from titan_rl.serving.protocols.openai.responses import StoredResponses, answer_responses
from titan_rl.serving.protocols.tokens import answer_detokenize, answer_generate, answer_tokenize
from titan_rl.serving.protocols.wire import Backend
from titan_rl.serving.text import Text, Tokenizing

Endpoint = Callable[[Request], ASGIApp]
"""Function that reads a request and returns the ASGI application that answers it."""


@dataclass(frozen=True, slots=True)
class PolicyApp:
    """ASGI application of a served policy, with the state that a server needs for an orderly shutdown.

    Args:
        keys: Keys of clients and of the admin.
        exchanges: Requests in flight.
    """

    app: ASGIApp
    keys: Keys
    exchanges: Exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def make_app(
    stream: RequestFn,
    *,
    model: str,
    max_context: int,
    tokenizer: Any = None,
    renderer: Renderer | None = None,
    stop_token_ids: Sequence[int] | None = None,
    limits: ServerLimits | None = None,
    keys: Keys | None = None,
    any_model: bool = False,
    versions: Versions | None = None,
    wait_until_resumed: Callable[[], Awaitable[object]] | None = None,
    control: Control | None = None,
    trouble: Callable[[], str | None] | None = None,
    version: Callable[[], int] | None = None,
    episodes: EpisodeStore | None = None,
    open_episode: Open | None = None,
) -> PolicyApp:
    """Make an application that serves the policy behind `stream` under the name `model`.

    Example, with a router, and with a `GenerateFn`, which answers in one piece:

        make_app(router.stream, model="policy", max_context=4096, wait_until_resumed=router.wait_resumed)
        make_app(request_fn(generate), model="policy", max_context=4096, tokenizer=tokenizer, renderer=renderer)

    Args:
        max_context: Maximum number of tokens of prompt and completion together.
        tokenizer: Tokenizer of `transformers` or `tokenizers` that no other thread uses. Without it there are no text
            completions and no chat.
        renderer: Converts messages to tokens. Without it there is no chat.
        stop_token_ids: Stop tokens of the model, which end a completion unless a client asks for `ignore_eos`. Defaults
            to those of the renderer.
        any_model: Whether to answer under any other model name, too, for agents with a hard-coded name.
        versions: Other policies, which answer under their own names.
        wait_until_resumed: Awaited before an aborted completion continues.
        control: Target of the admin calls. Without it, or without an admin key, there are none.
        trouble: Returns the reason why the policy cannot answer at present, for `/health`; None while it can.
        version: Returns the policy version that answers new requests, for `/v1/models`.
        episodes: Store of episodes. The key of each admits only to its episode. Episodes opened later use `renderer`.
        open_episode: Opens an episode for `POST /episodes`. Without it harnesses cannot open episodes.
    """
    limits, keys = limits or ServerLimits(), keys or Keys()
    exchanges = Exchanges(limits, ServerMetrics())
    uninterrupted_stream = uninterrupted(stream, wait_until_resumed=wait_until_resumed)
    policy = ServedPolicy(
        model, uninterrupted_stream, max_context, exchanges.metrics, any_model=any_model, versions=versions
    )
    tokenizing = Tokenizing()
    text = None if tokenizer is None else Text(tokenizing.own(tokenizer))
    if renderer is not None:
        renderer = tokenizing.own(renderer)
        stop_token_ids = renderer.get_stop_token_ids() if stop_token_ids is None else stop_token_ids
        if episodes is not None:
            episodes.renderer = renderer
    conversations = turns = None
    if text is not None and renderer is not None:
        conversations, turns = Conversations(renderer, limits), Turns(text, renderer, tokenizing)
    backend = Backend(policy, exchanges, tokenizing, text, turns, tuple(stop_token_ids or ()))
    stored = StoredResponses(limits.response_bytes)
    others = [
        *status_routes(policy, trouble, version),
        stored.route(),
        *(admin_routes(control) if control is not None else ()),
        *(episode_routes(open_episode or _refuse_to_open) if episodes is not None else ()),
    ]
    endpoints = _Endpoints(_generating(backend, stored), others, with_keys=keys.required)
    admission = Admission(keys, conversations, episodes)
    dialects = {"/v1/messages": ANTHROPIC}
    middleware = RequestMiddleware(
        endpoints, admission, limits, exchanges.metrics, endpoints.paths, dialects, keyed=keys.required
    )
    return PolicyApp(middleware, keys, exchanges)


def _generating(backend: Backend, stored: StoredResponses) -> dict[str, Endpoint]:
    """Endpoints that generate or tokenize, by path. The method of all is POST."""
    threads = Threads(backend.exchanges.limits.response_bytes)
    return {
        "/inference/v1/generate": partial(answer_generate, backend),
        "/v1/completions": partial(answer_completions, backend),
        "/v1/chat/completions": partial(answer_chat, backend),
        "/v1/responses": partial(answer_responses, backend, stored),
        "/v1/messages": partial(answer_messages, backend, threads),
        "/v1/messages/count_tokens": partial(answer_count_tokens, backend),
        "/tokenize": partial(answer_tokenize, backend),
        "/detokenize": partial(answer_detokenize, backend),
    }


class _Endpoints:
    """ASGI application of all endpoints. Those that generate have one path each and are found without the router.

    Attributes:
        paths: Paths of all routes.
    """

    def __init__(self, generating: Mapping[str, Endpoint], others: Sequence[Route], *, with_keys: bool) -> None:
        self._generating = generating
        self._with_keys = with_keys
        self._reading = BodyReading()
        described = Route("/openapi.json", self._description)
        routes = [*others, described, *(_post(path, endpoint) for path, endpoint in generating.items())]
        self.paths = {route.path for route in routes}
        self._names = sorted(path.replace(":path", "") for path in self.paths)
        self._router = Router(routes, redirect_slashes=False, default=self._no_such_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._generating.get(scope["path"]) if scope["method"] == "POST" else None
        app = self._router if endpoint is None else await self._reading(endpoint, Request(scope))
        await app(scope, receive, send)

    async def _description(self, request: Request) -> Response:
        return JSONResponse(openapi(tuple(self._names), with_keys=self._with_keys))

    async def _no_such_path(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(404, f"unknown path; the paths are {', '.join(self._names)}", code="unknown_path")


async def _refuse_to_open(wait_s: float) -> Opened:
    raise ApiError(404, "this server does not open episodes for harnesses")


def _post(path: str, endpoint: Endpoint) -> Route:
    async def answer(request: Request) -> Any:
        return endpoint(request)

    return Route(path, answer, methods=["POST"])
