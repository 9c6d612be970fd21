"""How a protocol tells of errors and events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from titan_rl.serving.http.api_error import ApiError


@dataclass(frozen=True, slots=True)
class Dialect:
    """
    Args:
        error: the body of an error.
        event: one server-sent event.
        stream_error: the event of an error, in a stream that has begun.
        last: ends a stream.
        request_id_headers: of each answer, in which clients look for the request's ID.
    """

    error: Callable[[ApiError], Any]
    event: Callable[[Any], bytes]
    stream_error: Callable[[ApiError], Any]
    last: bytes = b""
    request_id_headers: tuple[bytes, ...] = (b"x-request-id",)


def plain_event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(data: Any) -> bytes:
    """One that says in its own line of which type it is."""
    return b"event: " + data["type"].encode() + b"\n" + plain_event(data)


OPENAI = Dialect(ApiError.body, plain_event, ApiError.body, b"data: [DONE]\n\n")
