"""The bodies of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from titan_rl.serving.http.api_error import ApiError, bad_body

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
            ApiError: what `read` raises.
        """
        if len(request.scope["body"]) <= _SHORT:
            return read(request)
        return await asyncio.get_running_loop().run_in_executor(self._thread, read, request)
