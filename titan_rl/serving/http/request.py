"""Checks and reading of requests before an endpoint sees them: keys, sizes, time limits, bodies."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
"""A list of which the first wrong item is told, and no other looked at: there may be a million of them."""


_SHORT = 1 << 16  # bytes
_MOST_FIELDS = 256


class Body(BaseModel):
    """A request. A field that is not listed is refused by its name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


def read(request: Request, kind: type[M]) -> M:
    """
    Raises:
        ApiError: 400, names the field that is wrong.
    """
    body: bytes = request.scope["body"]  # which the middleware has read whole
    if len(body) > _SHORT:
        _check_fields(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise bad_body(error) from None


def _check_fields(body: bytes) -> None:
    """Telling of a million fields one by one that they are not supported takes seconds."""
    with suppress(msgspec.DecodeError, RecursionError):  # what it is instead is told by who reads it
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if len(fields) > _MOST_FIELDS:
            raise ApiError(400, f"the body has {len(fields)} fields; no request has more than {_MOST_FIELDS}")


class BodyReading:
    """Reads requests beside the event loop: short ones at once, and long ones in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "reading")

    async def __call__(self, read: Callable[[Request], T], request: Request) -> T:
        """
        Raises:
            ApiError: What `read` raises.
        """
        if len(request.scope["body"]) <= _SHORT:
            return read(request)
        return await asyncio.get_running_loop().run_in_executor(self._thread, read, request)


logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")

Admit = Callable[[str, bytes | None], tuple[str, object]]


class RequestMiddleware:
    """The outermost application. It reads a request's body whole, into its scope, and turns whatever is raised into an
    answer.

    Args:
        admit: Given a path and a key, says which path to serve and who asks, or raises an `ApiError`.
        paths: Those that the metrics name.
        dialects: Of paths whose errors are not told in OpenAI's form.
        keyed: Whether clients need a key, which no page of another host has.
    """

    def __init__(
        self,
        app: ASGIApp,
        admit: Admit,
        limits: ServerLimits,
        metrics: ServerMetrics,
        paths: Container[str],
        dialects: Mapping[str, Dialect],
        *,
        keyed: bool,
    ) -> None:
        self._app = app
        self._admit = admit
        self._limits = limits
        self._metrics = metrics
        self._paths = paths
        self._dialects = dialects
        self._keyed = keyed

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
                self._metrics.responses.labels(path if path in self._paths else "other", str(message["status"])).inc()
                own = [(name, request_id) for name in self._dialect(path).request_id_headers]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            path, caller = self._admit(scope["path"], _key(headers))
            body = await self._body(headers, receive)
            if scope["method"] == "POST" and not _is_json(headers):
                # Else a page in somebody's browser could post to a server on loopback without being asked.
                raise ApiError(415, "the content-type is not application/json")
            if headers.get(b"content-encoding", b"identity") != b"identity":
                raise ApiError(415, "the body is compressed; send it as it is, without a content-encoding")
            self._check_page(headers.get(b"origin"), _host(headers, scope["http_version"]), scope.get("server"))
            # With an "app" in its scope, the router raises where it finds no route.
            own = {"app": self, "path": path, "caller": caller, "body": body, "request_id": request_id.decode()}
            await self._app({**scope, **own}, receive, noted)
        except ClientDisconnect:
            self._metrics.gone.inc()
        except Exception as error:
            if started:
                logger.error("request %s failed after its answer had begun", request_id.decode(), exc_info=error)
                raise
            await send_error(noted, api_error_of(error, request_id.decode()), self._dialect(path))

    def _check_page(self, origin: bytes | None, host: bytes | None, server: tuple[str, int | None] | None) -> None:
        """Browsers name the page that asks, unless they take the server for one of the page's own. They always name the
        host, so that a request without one is none of theirs."""
        if origin is not None and not names_this_machine(host_of(origin.decode(errors="replace"))):
            raise ApiError(403, "pages of other hosts are not answered")
        if self._keyed or host is None or server is None or not names_this_machine(server[0]):
            return
        if not names_this_machine(host_of(host.decode(errors="replace"))):
            raise ApiError(
                403,
                "this server has no keys and is for this machine alone: ask it as localhost, or give it keys "
                "(TITAN_RL_API_KEY)",
            )

    def _dialect(self, path: str) -> Dialect:
        """Also of a path that is an episode's, to whoever is not let in, and of one below that there is not."""
        return next((dialect for part, dialect in self._dialects.items() if part in path), OPENAI)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        most = self._limits.body_bytes
        too_long = ApiError(413, f"the body is longer than {most} bytes", code="request_too_large")
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
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
            raise ApiError(408, f"the body did not arrive within {self._limits.body_s:g} s") from None


def _key(headers: dict[bytes, bytes]) -> bytes | None:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return (key.strip() if scheme.lower() == b"bearer" else b"") or headers.get(b"x-api-key")


def _is_json(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"


def _host(headers: dict[bytes, bytes], http_version: str) -> bytes | None:
    """
    Raises:
        ApiError: 400, a request has none that must have one.
    """
    host = headers.get(b"host")
    if host is None and http_version == "1.1":
        raise ApiError(400, "the request has no Host header, which HTTP/1.1 asks for", code="missing_host")
    return host


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    """The one that the client gives, so that it finds its request in logs, or a new one."""
    given = headers.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else b"req_" + uuid.uuid4().hex.encode()
