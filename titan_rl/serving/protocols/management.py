"""Endpoints of the server itself: health, metrics, models, admin calls, and its OpenAPI description."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from titan_rl.core.errors import StateDictError, UnavailableWeightsError
from titan_rl.serving.api_keys import ADMIN_PREFIX, OPEN_PATHS
from titan_rl.serving.episode_store import EPISODES, EndBody, OpenBody, RewardBody
from titan_rl.serving.http.errors import ApiError
from titan_rl.serving.http.request import Body, read
from titan_rl.serving.policy import ServedPolicy
from titan_rl.serving.protocols.anthropic import ConversationBody, MessagesBody
from titan_rl.serving.protocols.openai.bodies import ChatBody, CompletionBody, ResponsesBody
from titan_rl.serving.protocols.tokens import DetokenizeBody, GenerateBody, TokenizeBody
from titan_rl.serving.protocols.wire import SCHEMAS


def status_routes(
    policy: ServedPolicy, trouble: Callable[[], str | None] | None, version: Callable[[], int] | None
) -> list[Route]:
    """Make the routes for health, metrics and models.

    Args:
        trouble: Returns the reason why the policy cannot answer at present; None while it can.
        version: Returns the policy version that answers new requests, for the model's entry.
    """

    def card(name: str, weight_version: int | None = None) -> dict[str, object]:
        # The fields of OpenAI's and of Anthropic's form, because both have the same path.
        fields: dict[str, object] = {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(policy.created, UTC).isoformat(),
            "object": "model",
            "created": policy.created,
            "owned_by": "titan_rl",
            "max_model_len": policy.max_context,
        }
        return fields if weight_version is None else {**fields, "weight_version": str(weight_version)}

    def cards() -> list[dict[str, object]]:
        found = [card(policy.model, None if version is None else version())]
        if (others := policy.versions) is not None:
            found += [card(name, others.version_of(name)) for name in others.names()]
        return found

    async def health(request: Request) -> Response:
        if trouble is not None and (why := trouble()) is not None:
            return JSONResponse({"status": "unavailable", "reason": why}, 503, {"retry-after": "1"})
        return JSONResponse({"status": "ok"})

    async def metric_text(request: Request) -> Response:
        return Response(policy.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(request: Request) -> Response:
        data = cards()
        page = {"has_more": False, "first_id": policy.model, "last_id": data[-1]["id"]}
        return JSONResponse({"object": "list", "data": data, **page})

    async def one_model(request: Request) -> Response:
        name = policy.named(request.path_params["name"]).model
        return JSONResponse(next((each for each in cards() if each["id"] == name), card(policy.model)))

    return [
        Route("/health", health),
        Route("/metrics", metric_text),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
    ]


class Control(Protocol):
    """Target of the admin calls: a `GeneratorRouter` is one."""

    @property
    def version(self) -> int | None: ...
    async def pause(self, mode: Any = ..., /) -> object: ...
    async def resume(self) -> None: ...
    async def pull_state_dict(self, version: int, /) -> object: ...
    async def abort(self, request_ids: Iterable[str] | None = None, /) -> object: ...


class PauseBody(Body):
    mode: Literal["keep", "abort", "wait"] = "keep"


class PullBody(Body):
    version: Annotated[int, Field(ge=0, lt=2**63)]


class Nothing(Body):
    pass


def admin_routes(control: Control) -> list[Route]:
    """Make the routes of the admin calls. Each answers 204 when it is done, and 409 if the policy's state forbids
    it."""

    async def pause(request: Request) -> None:
        await control.pause(read(request, PauseBody).mode)

    async def resume(request: Request) -> None:
        read(request, Nothing)
        await control.resume()

    async def pull(request: Request) -> None:
        version = read(request, PullBody).version
        try:
            await control.pull_state_dict(version)
        except UnavailableWeightsError as error:
            served = "no version is" if control.version is None else f"version {control.version} is the newest"
            message = f"version {version} is not published; {served}; the served version is unchanged"
            raise ApiError(409, message, param="version", code="unknown_version") from error

    async def abort(request: Request) -> None:
        read(request, Nothing)
        await control.abort()

    def route(endpoint: Any) -> Route:
        async def answer(request: Request) -> Response:
            try:
                await endpoint(request)
            except RuntimeError as error:  # already paused, or not paused
                raise ApiError(409, str(error)) from error
            except StateDictError as error:
                raise ApiError(409, "no replica could pull this version; see the server's log") from error
            return Response(status_code=204)

        return Route(f"{ADMIN_PREFIX}{endpoint.__name__}", answer, methods=["POST"])

    return [route(endpoint) for endpoint in (pause, resume, pull, abort)]


_JSON = "application/json"
_STREAM = "text/event-stream"
_SCHEMAS = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class EndpointDescription:
    """Description of one endpoint for OpenAPI.

    Args:
        answers: Media types of the answer; empty for an answer without content.
        errors: Name of the schema of the errors.
        also_deletes: Whether the path also takes DELETE, which removes what GET returns.
    """

    summary: str
    body: type[BaseModel] | None = None
    answers: tuple[str, ...] = (_JSON,)
    errors: Literal["OpenAIError", "AnthropicError"] = "OpenAIError"
    also_deletes: bool = False


_GENERATES = (_JSON, _STREAM)
_OPERATIONS = {
    "/inference/v1/generate": EndpointDescription("Token ids in, token ids out.", GenerateBody, _GENERATES),
    "/v1/completions": EndpointDescription("Text that continues a prompt.", CompletionBody, _GENERATES),
    "/v1/chat/completions": EndpointDescription("Messages in, a message out.", ChatBody, _GENERATES),
    "/v1/responses": EndpointDescription("Items in, items out.", ResponsesBody, _GENERATES),
    "/v1/responses/{id}": EndpointDescription("A stored response.", also_deletes=True),
    "/v1/messages": EndpointDescription("Blocks in, blocks out.", MessagesBody, _GENERATES, "AnthropicError"),
    "/v1/messages/count_tokens": EndpointDescription(
        "Tokens of a conversation.", ConversationBody, errors="AnthropicError"
    ),
    "/tokenize": EndpointDescription("The tokens of a text or a conversation.", TokenizeBody),
    "/detokenize": EndpointDescription("The text of tokens.", DetokenizeBody),
    "/v1/models": EndpointDescription("The model."),
    "/v1/models/{name}": EndpointDescription("The model, by its name."),
    "/health": EndpointDescription("Whether the policy can answer; 503 with the reason if it cannot."),
    "/metrics": EndpointDescription("Metrics in Prometheus format.", answers=("text/plain",)),
    "/openapi.json": EndpointDescription("This description."),
    "/episodes": EndpointDescription("Open an episode.", OpenBody),
    "/episodes/{id}": EndpointDescription("The state of an episode."),
    "/episodes/{id}/reward": EndpointDescription("Report rewards of an episode or of one of its turns.", RewardBody),
    "/episodes/{id}/end": EndpointDescription("End an episode.", EndBody),
    "/admin/pause": EndpointDescription("Pause generation.", PauseBody, ()),
    "/admin/resume": EndpointDescription("Resume generation.", Nothing, ()),
    "/admin/pull": EndpointDescription("Pull a policy version.", PullBody, ()),
    "/admin/abort": EndpointDescription("Abort the requests in flight.", Nothing, ()),
}
_ERRORS = {name: SCHEMAS[name] for name in ("OpenAIError", "AnthropicError")}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "episode": {"type": "http", "scheme": "bearer", "description": "The episode's own key."},
    "admin": {"type": "http", "scheme": "bearer", "description": "The admin key."},
}


@cache
def openapi(paths: tuple[str, ...], *, with_keys: bool) -> dict[str, Any]:
    """Describe the server in OpenAPI's form.

    Args:
        paths: All paths of the server. Each must have a description.
        with_keys: Whether clients need a key.
    """
    operations = {path: _OPERATIONS[path] for path in paths}
    bodies = {operation.body for operation in operations.values() if operation.body is not None}
    _, schemas = models_json_schema(
        [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)], ref_template=_SCHEMAS
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "A policy of titan_rl", "version": "1"},
        "paths": {path: _described(path, operation, with_keys) for path, operation in operations.items()},
        "components": {"schemas": {**schemas["$defs"], **_ERRORS}, "securitySchemes": _KEYS},
    }


def _described(path: str, operation: EndpointDescription, with_keys: bool) -> dict[str, Any]:
    content = {media: {"schema": {"type": "object"}} if media == _JSON else {} for media in operation.answers}
    done = {"description": "Done.", **({"content": content} if content else {})}
    error = {"$ref": _SCHEMAS.format(model=operation.errors)}
    description: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200" if content else "204": done,
            "default": {"description": "An error.", "content": {_JSON: {"schema": error}}},
        },
    }
    if path.startswith(ADMIN_PREFIX):
        description["security"] = [{"admin": []}]
    elif path.startswith(f"{EPISODES}/"):
        description["security"] = [{"episode": []}]
    elif with_keys and path not in OPEN_PATHS:
        description["security"] = [{"bearer": []}, {"header": []}]
    if names := re.findall(r"{(\w+)}", path):
        description["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body is None:
        return {"get": description, "delete": description} if operation.also_deletes else {"get": description}
    body = {"$ref": _SCHEMAS.format(model=operation.body.__name__)}
    return {"post": {**description, "requestBody": {"required": True, "content": {_JSON: {"schema": body}}}}}
