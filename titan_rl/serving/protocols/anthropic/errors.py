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
    """There is no field for the one that is wrong, so the message names it."""
    message, param = error.message, error.param
    if param is not None and param not in message:
        message = f"{param}: {message}"
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = Dialect(_error, named_event, _error)
