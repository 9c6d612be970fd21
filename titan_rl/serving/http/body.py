"""The bodies of requests."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from titan_rl.serving.http.api_error import bad_body

M = TypeVar("M", bound=BaseModel)


class Body(BaseModel):
    """A request. A field that is not listed is refused by its name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


async def read(request: Request, kind: type[M]) -> M:
    """
    Raises:
        ApiError: 400, names the field that is wrong.
    """
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise bad_body(error) from None
