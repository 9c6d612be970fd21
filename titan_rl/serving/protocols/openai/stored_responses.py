"""Responses that were given, for requests that go on from one or ask for it again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from cachetools import LRUCache
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import Caller, caller_of
from titan_rl.serving.http.api_error import UNSUPPORTED_VALUE, ApiError


@dataclass(frozen=True, slots=True)
class _Stored:
    response: bytes  # as it was sent
    messages: bytes  # the conversation with its reply, as JSON


class StoredResponses:
    """By their ids; the least recently used are forgotten. Each is its caller's, and is found by nobody else."""

    def __init__(self, most_bytes: int) -> None:
        self._stored: LRUCache[tuple[bytes, str], _Stored] = LRUCache(most_bytes, getsizeof=_num_bytes)
        self._lock = threading.Lock()  # long requests are read in a thread

    def add(self, caller: Caller, response_id: str, response: msgspec.Raw, messages: Sequence[Message]) -> None:
        stored = _Stored(bytes(response), msgspec.json.encode(messages))
        with suppress(ValueError), self._lock:  # one that is larger than all may be
            self._stored[caller.name, response_id] = stored

    def messages(self, caller: Caller, response_id: str | None) -> Sequence[Message]:
        """The conversation that a request goes on from; none where it names no response.

        Raises:
            ApiError: 400, there is none of this id, or it was forgotten.
        """
        if response_id is None:
            return ()
        with self._lock:
            found = self._stored.get((caller.name, response_id))
        if found is None:
            message = "previous_response_id is of no response that is stored here; send the whole input"
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        return msgspec.json.decode(found.messages)

    def route(self) -> Route:
        """`GET` and `DELETE /v1/responses/{id}`."""

        async def one(request: Request) -> Response:
            key = caller_of(request).name, request.path_params["id"]
            for name in request.query_params:
                raise ApiError(400, f"{name} is not supported", param=name, code=UNSUPPORTED_VALUE)
            is_over = request.method == "DELETE"
            with self._lock:
                found = self._stored.pop(key, None) if is_over else self._stored.get(key)
            if found is None:
                raise ApiError(404, "no response of this id is stored here", param="id", code="response_not_found")
            if is_over:
                return JSONResponse({"id": key[1], "object": "response", "deleted": True})
            return Response(found.response, media_type="application/json")

        return Route("/v1/responses/{id}", one, methods=["GET", "DELETE"])


def _num_bytes(stored: _Stored) -> int:
    return len(stored.response) + len(stored.messages)
