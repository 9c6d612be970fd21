"""Errors as clients receive them: `ApiError`, its mapping from exceptions, and the form that each protocol gives it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from titan_rl.core.errors import (
    ActorDiedError,
    BusyError,
    EpisodeEndedError,
    GenerationError,
    RequestError,
    UnsupportedSamplingError,
)

logger = logging.getLogger(__name__)

UNSUPPORTED_VALUE = "unsupported_value"
"""Error code for a known field with an unknown value."""

NOT_HONOURED = "not supported by the engine behind this server; leave it out"

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Error that a client receives in answer to a request.

    Args:
        status: HTTP status.
        message: Text for the client. It must contain no path, no traceback and nothing else about this machine.
        param: Field that is wrong, for example "messages[0].content".
        code: Code for programs, for example "model_not_found".
        headers: Further HTTP headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error_of(error: Exception, request_id: str) -> ApiError:
    """Return the error that a client receives for an exception. Confidential details are logged with the request's
    id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # no such path, or the path does not have the method
        return ApiError(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, EpisodeEndedError):
        return ApiError(410, str(error), code="episode_ended")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), code="too_many_requests", headers={"retry-after": "1"})
    if isinstance(error, UnsupportedSamplingError):
        name = error.parameter
        return ApiError(400, f"{name}: {NOT_HONOURED}", param=name, code=UNSUPPORTED_VALUE)
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, GenerationError | ActorDiedError):
        logger.warning("request %s failed: %r", request_id, error)
        return ApiError(503, "the policy cannot answer at present; try again", headers={"retry-after": "1"})
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, "the server failed; see its log")


def _nearest(details: Sequence[Any]) -> Any:
    """Choose among the errors of a field that allows several types: the one for the type that was given."""
    of_first = [one for one in details if one["loc"][:1] == details[0]["loc"][:1]]
    return next((one for one in of_first if not one["type"].endswith("_type")), details[0])


def bad_body(error: ValidationError) -> ApiError:
    """Return the error for the first problem of a body, with the name of its field."""
    details = error.errors(include_url=False, include_input=False)
    first = next((one for one in details if one["type"] == "extra_forbidden"), _nearest(details))
    if (kind := next((one for one in details if one["loc"] == (*first["loc"][:-1], "type")), None)) is not None:
        first = kind  # an object of another kind may lack fields, so only the wrong kind is worth reporting
    param = ""
    for step in first["loc"]:
        if isinstance(step, str) and (step == "str" or not step.isidentifier()):
            continue  # the name of one of several possible types
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else step
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not supported here; leave it out", param=param, code="unsupported_parameter")
    if first["type"] == "literal_error":
        expected = first.get("ctx", {})["expected"]
        message = f"{param}: not supported; it may be {expected}"
        return ApiError(400, message, param=param, code=UNSUPPORTED_VALUE)
    where = f"{param}: " if param else ""
    code = UNSUPPORTED_VALUE if first["type"] == UNSUPPORTED_VALUE else None
    return ApiError(400, f"{where}{first['msg']}", param=param or None, code=code)


@dataclass(frozen=True, slots=True)
class Dialect:
    """Form of answers in one protocol.

    Args:
        error: Makes the body of an error.
        event: Encodes a server-sent event.
        stream_error: Makes the event of an error in a stream that has begun.
        last: Bytes that end a stream.
        request_id_headers: Headers of each answer in which clients look for the id of the request.
    """

    error: Callable[[ApiError], Any]
    event: Callable[[Any], bytes]
    stream_error: Callable[[ApiError], Any]
    last: bytes = b""
    request_id_headers: tuple[bytes, ...] = (b"x-request-id",)


def plain_event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(data: Any) -> bytes:
    """Encode an event with its type in a separate line."""
    return b"event: " + data["type"].encode() + b"\n" + plain_event(data)


OPENAI = Dialect(ApiError.body, plain_event, ApiError.body, b"data: [DONE]\n\n")
