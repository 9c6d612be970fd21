"""The OpenAPI description of the endpoints that take a body. It is made of what checks the bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from titan_rl.serving.protocols.openai.bodies import ChatBody, CompletionBody
from titan_rl.serving.protocols.tokens import GenerateBody

_BODIES = {
    "/inference/v1/generate": GenerateBody,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}
_ERROR = {
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
}
_JSON = "application/json"


@cache
def openapi() -> dict[str, Any]:
    _, schemas = models_json_schema(
        [(body, "validation") for body in _BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    failed = {"description": "An error, in OpenAI's form.", "content": {_JSON: {"schema": _ERROR}}}
    answered = {"description": "The completions.", "content": {_JSON: {}, "text/event-stream": {}}}
    paths = {
        path: {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}},
                },
                "responses": {"200": answered, "default": failed},
            }
        }
        for path, body in _BODIES.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "A policy of titan_rl", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
