"""The ASGI application that serves a policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from titan_rl.rollout.renderer.types import Renderer
from titan_rl.serving.access import Admission, Keys
from titan_rl.serving.conversations.caller import Conversations
from titan_rl.serving.conversations.turn import Turns
from titan_rl.serving.episode_store import EpisodeStore, Open, Opened, episode_routes
from titan_rl.serving.http.errors import ApiError
from titan_rl.serving.http.exchange import Exchanges, ServerLimits, ServerMetrics
from titan_rl.serving.http.request import BodyReading, RequestMiddleware
from titan_rl.serving.policy import ServedPolicy, StreamFn, unbroken
from titan_rl.serving.protocols.about import Control, about_routes, admin_routes, openapi
from titan_rl.serving.protocols.anthropic.messages import ANTHROPIC, CountTokensEndpoint, MessagesEndpoint, Threads
from titan_rl.serving.protocols.openai.chat import ChatEndpoint
from titan_rl.serving.protocols.openai.completions import CompletionEndpoint
from titan_rl.serving.protocols.openai.responses import ResponsesEndpoint, StoredResponses
from titan_rl.serving.protocols.tokens import DetokenizeEndpoint, TokenEndpoint, TokenizeEndpoint
from titan_rl.serving.text import Text, Tokenizing

Endpoint = Callable[[Request], ASGIApp]
"""Reads a request, and gives what answers it."""


class PolicyApp:
    """An ASGI application, and what a server needs to end it in order.

    Attributes:
        keys: who may call what.
        exchanges: the requests that are being answered.
    """

    def __init__(self, app: ASGIApp, keys: Keys, exchanges: Exchanges) -> None:
        self._app = app
        self.keys = keys
        self.exchanges = exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def make_app(
    stream: StreamFn,
    *,
    model: str,
    max_context: int,
    tokenizer: Any = None,
    renderer: Renderer | None = None,
    stop_token_ids: Sequence[int] | None = None,
    limits: ServerLimits | None = None,
    keys: Keys | None = None,
    any_model: bool = False,
    wait_until_resumed: Callable[[], Awaitable[object]] | None = None,
    control: Control | None = None,
    trouble: Callable[[], str | None] | None = None,
    version: Callable[[], int] | None = None,
    episodes: EpisodeStore | None = None,
    open_episode: Open | None = None,
) -> PolicyApp:
    """Serve the policy behind `stream` under the name `model`.

    Example: a router, and a `GenerateFn`, which answers in one piece:

        make_app(router.stream, model="policy", max_context=4096, wait_until_resumed=router.wait_resumed)
        make_app(in_one_piece(generate), model="policy", max_context=4096, tokenizer=tokenizer, renderer=renderer)

    Args:
        max_context: most tokens of prompt and completion.
        tokenizer: of `transformers` or `tokenizers`, which no other thread uses. Without it there are no text
            completions and no chat.
        renderer: between messages and tokens. Without it there is no chat.
        stop_token_ids: the model's own, which end a completion unless a client asks for `ignore_eos`. By default the
            renderer's.
        any_model: answer under any other name, too, for agents that have a model's name written into them.
        wait_until_resumed: awaited before an aborted completion is gone on with.
        control: what the admin calls act on. Without it, or without an admin key, there are none.
        trouble: why the policy cannot answer at present, for `/health`; None while it can.
        version: of the policy that answers new requests, for `/v1/models`.
        episodes: whose keys are let in, too, each for its episode alone. Those opened from now on use this renderer.
        open_episode: what `POST /episodes` does. Without it harnesses cannot open any.
    """
    limits = limits or ServerLimits()
    keys = keys or Keys()
    metrics = ServerMetrics()
    exchanges = Exchanges(limits, metrics)
    whole = unbroken(stream, wait_until_resumed=wait_until_resumed)
    policy = ServedPolicy(model, whole, max_context, metrics, any_model=any_model)
    tokenizing = Tokenizing()
    text = None if tokenizer is None else Text(tokenizing.own(tokenizer))
    renderer = None if renderer is None else tokenizing.own(renderer)
    if episodes is not None and renderer is not None:
        episodes.renderer = renderer
    conversations, turns = None, None
    if text is not None and renderer is not None:
        conversations = Conversations(
            renderer,
            most=limits.num_conversations,
            most_turns=limits.conversation_turns,
            most_bytes=limits.conversation_bytes,
        )
        turns = Turns(policy, text, renderer, tokenizing)
    if stop_token_ids is None:
        stop_token_ids = () if renderer is None else renderer.get_stop_token_ids()
    stops = tuple(stop_token_ids)
    stored = StoredResponses(limits.response_bytes)
    shown = _counted if text is None else text.decode

    async def description(request: Request) -> Response:
        return JSONResponse(openapi(tuple(paths), with_keys=keys.required))

    endpoints: dict[str, Endpoint] = {
        "/inference/v1/generate": TokenEndpoint(policy, exchanges, shown, stops),
        "/v1/completions": CompletionEndpoint(policy, exchanges, text, tokenizing, stops),
        "/v1/chat/completions": ChatEndpoint(turns, exchanges, stops),
        "/v1/responses": ResponsesEndpoint(turns, exchanges, stored, stops),
        "/v1/messages": MessagesEndpoint(turns, exchanges, Threads(limits.response_bytes), stops),
        "/v1/messages/count_tokens": CountTokensEndpoint(turns, exchanges),
        "/tokenize": TokenizeEndpoint(policy, exchanges, text, turns, tokenizing),
        "/detokenize": DetokenizeEndpoint(policy, exchanges, text),
    }
    routes = [
        *about_routes(policy, metrics, trouble, version),
        Route("/openapi.json", description),
        stored.route(),
        *(_post(path, endpoint) for path, endpoint in endpoints.items()),
        *(admin_routes(control) if control is not None else ()),
        *(episode_routes(open_episode or _none_to_open) if episodes is not None else ()),
    ]
    paths = sorted(route.path.replace(":path", "") for route in routes)
    dialects = {route.path: ANTHROPIC for route in routes if route.path.startswith("/v1/messages")}

    async def no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(404, f"there is no such path here; there are {', '.join(paths)}", code="unknown_path")

    reading = BodyReading()
    router = Router(routes, redirect_slashes=False, default=no_such_path)
    admit = Admission(keys, conversations, episodes)

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        """What generates has one path each, which need not be looked for among all."""
        endpoint = endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        await (router if endpoint is None else await reading(endpoint, Request(scope)))(scope, receive, send)

    told = {route.path for route in routes}
    middleware = RequestMiddleware(answered, admit, limits, metrics, told, dialects, keyed=keys.required)
    return PolicyApp(middleware, keys, exchanges)


async def _none_to_open(wait_s: float) -> Opened:
    raise ApiError(404, "this server's episodes are not opened by harnesses")


def _counted(token_ids: Sequence[int]) -> str:
    return f"{len(token_ids)} tokens"


def _post(path: str, endpoint: Endpoint) -> Route:
    async def answer(request: Request) -> Any:
        return endpoint(request)

    return Route(path, answer, methods=["POST"])
