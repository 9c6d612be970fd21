"""Checks and parsing of requests before an endpoint sees them: keys, sizes, time limits, bodies."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from titan_rl.core.calls.parsing import host_of, names_this_machine
from titan_rl.serving.http.errors import OPENAI, ApiError, Dialect, api_error_of, bad_body
from titan_rl.serving.http.exchange import ServerLimits, ServerMetrics, send_error

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

Many = Annotated[list[T], Field(fail_fast=True)]
"""List of which only the first wrong item is reported, and no later one is checked, because there may be a million."""


_SHORT = 1 << 16  # bytes
_MOST_FIELDS = 256


class Body(BaseModel):
    """Body of a request. Unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


def read(request: Request, kind: type[M]) -> M:
    """Parse the body of a request.

    Raises:
        ApiError: With status 400. The message names the wrong field.
    """
    body: bytes = request.scope["body"]  # the middleware has read the whole body
    if len(body) > _SHORT:
        _check_fields(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise bad_body(error) from None


def _check_fields(body: bytes) -> None:
    """Refuse a body with too many fields, because reporting a million unknown fields one by one takes seconds."""
    with suppress(msgspec.DecodeError, RecursionError):  # the parser reports these
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if len(fields) > _MOST_FIELDS:
            raise ApiError(400, f"the body has {len(fields)} fields; no request has more than {_MOST_FIELDS}")


class BodyReading:
    """Parser of requests that handles short ones at once, and long ones in a thread, off the event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "reading")

    async def __call__(self, read: Callable[[Request], T], request: Request) -> T:
        """Call `read` with the request, and return its result.

        Raises:
            ApiError: `read` raises it.
        """
        if len(request.scope["body"]) <= _SHORT:
            return read(request)
        return await asyncio.get_running_loop().run_in_executor(self._thread, read, request)


logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")

Admit = Callable[[str, bytes | None], tuple[str, object]]


@dataclass(frozen=True, slots=True)
class RequestMiddleware:
    """Outermost ASGI application. It reads the whole body of a request into its scope, and converts all exceptions to
    answers.

    Args:
        admit: Called with a path and a key. Returns the path to serve and the caller, or raises an `ApiError`.
        paths: Paths that appear in the metrics.
        dialects: Forms of errors by part of a path, for paths that do not use OpenAI's form.
        keyed: Whether clients need a key. Pages of other hosts have no key.
    """

    app: ASGIApp
    admit: Admit
    limits: ServerLimits
    metrics: ServerMetrics
    paths: Container[str]
    dialects: Mapping[str, Dialect]
    keyed: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started, path = False, scope["path"]
        headers = dict(scope["headers"])
        request_id = _request_id(headers)

        async def noted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.metrics.responses.labels(path if path in self.paths else "other", str(message["status"])).inc()
                own = [(name, request_id) for name in self._dialect(path).request_id_headers]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            path, caller = self.admit(scope["path"], _key(headers))
            body = await self._body(headers, receive)
            if scope["method"] == "POST" and not _is_json(headers):
                # Otherwise a page in a user's browser could post to a server on loopback without a preflight request.
                raise ApiError(415, "the content-type is not application/json")
            if headers.get(b"content-encoding", b"identity") != b"identity":
                raise ApiError(415, "the body is compressed; send it without a content-encoding")
            self._check_page(headers.get(b"origin"), _host(headers, scope["http_version"]), scope.get("server"))
            # With "app" in its scope, the router raises an exception if it finds no route.
            own = {"app": self, "path": path, "caller": caller, "body": body, "request_id": request_id.decode()}
            await self.app({**scope, **own}, receive, noted)
        except ClientDisconnect:
            self.metrics.gone.inc()
        except Exception as error:
            if started:
                logger.error("request %s failed after its answer had begun", request_id.decode(), exc_info=error)
                raise
            await send_error(noted, api_error_of(error, request_id.decode()), self._dialect(path))

    def _check_page(self, origin: bytes | None, host: bytes | None, server: tuple[str, int | None] | None) -> None:
        """Refuse requests from pages of other hosts. Browsers send the page's origin, unless they take the server for
        the page's own. They always send the host, so a request without a host is not from a browser."""
        if origin is not None and not names_this_machine(host_of(origin.decode(errors="replace"))):
            raise ApiError(403, "requests from pages of other hosts are refused")
        if self.keyed or host is None or server is None or not names_this_machine(server[0]):
            return
        if not names_this_machine(host_of(host.decode(errors="replace"))):
            raise ApiError(
                403,
                "this server has no keys and only answers requests to localhost: use localhost, or give it keys "
                "(TITAN_RL_API_KEY)",
            )

    def _dialect(self, path: str) -> Dialect:
        """Return the form of errors for a path, also below an episode's path and for paths that do not exist."""
        return next((dialect for part, dialect in self.dialects.items() if part in path), OPENAI)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        most = self.limits.body_bytes
        too_long = ApiError(413, f"the body is longer than {most} bytes", code="request_too_large")
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_long
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.limits.body_s:g} s") from None


def _key(headers: dict[bytes, bytes]) -> bytes | None:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return (key.strip() if scheme.lower() == b"bearer" else b"") or headers.get(b"x-api-key")


def _is_json(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"


def _host(headers: dict[bytes, bytes], http_version: str) -> bytes | None:
    """Return the Host header of a request; None if there is none.

    Raises:
        ApiError: With status 400 if an HTTP/1.1 request has no Host header.
    """
    host = headers.get(b"host")
    if host is None and http_version == "1.1":
        raise ApiError(400, "the request has no Host header, which HTTP/1.1 requires", code="missing_host")
    return host


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    """Return the id that the client sent, by which it finds its request in logs, or a new one."""
    given = headers.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else b"req_" + uuid.uuid4().hex.encode()
