"""The OpenAPI description of the server. What it says of bodies is made of what checks them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from titan_rl.serving.episodes.endpoints import EPISODES, EndBody, OpenBody, RewardBody
from titan_rl.serving.http.admin import Nothing, PauseBody, PullBody
from titan_rl.serving.http.keys import ADMIN_PREFIX, OPEN_PATHS
from titan_rl.serving.protocols.anthropic.bodies import ConversationBody, MessagesBody
from titan_rl.serving.protocols.openai.bodies import ChatBody, CompletionBody, ResponsesBody
from titan_rl.serving.protocols.tokenizing import DetokenizeBody, TokenizeBody
from titan_rl.serving.protocols.tokens import GenerateBody

_JSON = "application/json"
_STREAM = "text/event-stream"
_SCHEMAS = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """
    Args:
        answers: media types of the answer; none where it has no content.
        errors: in whose form they are.
        also_deletes: what a GET tells of a DELETE removes.
    """

    summary: str
    body: type[BaseModel] | None = None
    answers: tuple[str, ...] = (_JSON,)
    errors: Literal["OpenAIError", "AnthropicError"] = "OpenAIError"
    also_deletes: bool = False


_GENERATES = (_JSON, _STREAM)
_OPERATIONS = {
    "/inference/v1/generate": Operation("Token ids in, token ids out.", GenerateBody, _GENERATES),
    "/v1/completions": Operation("Text that goes on from a prompt.", CompletionBody, _GENERATES),
    "/v1/chat/completions": Operation("Messages in, a message out.", ChatBody, _GENERATES),
    "/v1/responses": Operation("Items in, items out.", ResponsesBody, _GENERATES),
    "/v1/responses/{id}": Operation("A response that is stored.", also_deletes=True),
    "/v1/messages": Operation("Blocks in, blocks out.", MessagesBody, _GENERATES, "AnthropicError"),
    "/v1/messages/count_tokens": Operation("Tokens of a conversation.", ConversationBody, errors="AnthropicError"),
    "/tokenize": Operation("The tokens of a text or a conversation.", TokenizeBody),
    "/detokenize": Operation("The text of tokens.", DetokenizeBody),
    "/v1/models": Operation("The model."),
    "/v1/models/{name}": Operation("The model, by its name."),
    "/health": Operation("Whether the policy can answer; 503 with the reason where it cannot."),
    "/metrics": Operation("Metrics, as Prometheus has them.", answers=("text/plain",)),
    "/openapi.json": Operation("This description."),
    "/episodes": Operation("Open an episode.", OpenBody),
    "/episodes/{id}": Operation("How an episode goes."),
    "/episodes/{id}/reward": Operation("What an episode, or a turn of it, is worth.", RewardBody),
    "/episodes/{id}/end": Operation("An episode is over.", EndBody),
    "/admin/pause": Operation("Pause generation.", PauseBody, ()),
    "/admin/resume": Operation("Go on with generation.", Nothing, ()),
    "/admin/pull": Operation("Pull a policy version.", PullBody, ()),
    "/admin/abort": Operation("Abort what is under way.", Nothing, ()),
}
_ERRORS: dict[str, Any] = {
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "episode": {"type": "http", "scheme": "bearer", "description": "The episode's own key."},
    "admin": {"type": "http", "scheme": "bearer", "description": "The admin key."},
}


@cache
def openapi(paths: tuple[str, ...], *, with_keys: bool) -> dict[str, Any]:
    """
    Args:
        paths: those that the server has. Each has a description.
        with_keys: whether clients need one.
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


def _described(path: str, operation: Operation, with_keys: bool) -> dict[str, Any]:
    content = {media: {"schema": {"type": "object"}} if media == _JSON else {} for media in operation.answers}
    done = {"description": "Done.", **({"content": content} if content else {})}
    error = {"$ref": _SCHEMAS.format(model=operation.errors)}
    told: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200" if content else "204": done,
            "default": {"description": "What is wrong.", "content": {_JSON: {"schema": error}}},
        },
    }
    if path.startswith(ADMIN_PREFIX):
        told["security"] = [{"admin": []}]
    elif path.startswith(f"{EPISODES}/"):
        told["security"] = [{"episode": []}]
    elif with_keys and path not in OPEN_PATHS:
        told["security"] = [{"bearer": []}, {"header": []}]
    if names := re.findall(r"{(\w+)}", path):
        told["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body is None:
        return {"get": told, "delete": told} if operation.also_deletes else {"get": told}
    body = {"$ref": _SCHEMAS.format(model=operation.body.__name__)}
    return {"post": {**told, "requestBody": {"required": True, "content": {_JSON: {"schema": body}}}}}
