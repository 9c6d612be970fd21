"""Errors in Anthropic's form."""

from __future__ import annotations

from typing import Any

from titan_rl.serving.http.api_error import ApiError
from titan_rl.serving.http.dialect import Dialect, named_event

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error(error: ApiError) -> dict[str, Any]:
    """The body of an error. It has no field for the parameter that is wrong, so the message names it. Clients act on
    the code in its details, for example by going on without what is not supported."""
    message, param = error.message, error.param
    if param is not None and param not in message:
        message = f"{param}: {message}"
    told: dict[str, Any] = {
        "type": _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error"),
        "message": message,
    }
    if error.code is not None:
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told}


ANTHROPIC = Dialect(_error, named_event, _error, request_id_headers=(b"request-id", b"x-request-id"))
