"""The admin calls: what a trainer does to a policy, asked for over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from titan_rl.core.errors import StateDictError, UnavailableWeightsError
from titan_rl.serving.http.api_error import ApiError
from titan_rl.serving.http.body import Body, read
from titan_rl.serving.http.keys import ADMIN_PREFIX


class Control(Protocol):
    """What the admin calls need: a `GeneratorRouter` is one."""

    @property
    def version(self) -> int | None: ...
    async def pause(self, mode: Any = ..., /) -> object: ...
    async def resume(self) -> None: ...
    async def pull_state_dict(self, version: int, /) -> object: ...
    async def abort(self, request_ids: Iterable[str] | None = None, /) -> object: ...


class PauseBody(Body):
    mode: Literal["keep", "abort", "wait"] = "keep"


class PullBody(Body):
    version: Annotated[int, Field(ge=0, lt=2**63)]


class Nothing(Body):
    pass


def admin_routes(control: Control) -> list[Route]:
    """Each answers 204 when it is done, and 409 where the policy's state does not allow it."""

    async def pause(request: Request) -> Response:
        await control.pause(read(request, PauseBody).mode)
        return Response(status_code=204)

    async def resume(request: Request) -> Response:
        read(request, Nothing)
        await control.resume()
        return Response(status_code=204)

    async def pull(request: Request) -> Response:
        version = read(request, PullBody).version
        try:
            await control.pull_state_dict(version)
        except UnavailableWeightsError as error:
            served = "no version is" if control.version is None else f"version {control.version} is the newest"
            raise ApiError(
                409,
                f"version {version} is not published; {served}, and what is served is served on",
                param="version",
                code="unknown_version",
            ) from error
        return Response(status_code=204)

    async def abort(request: Request) -> Response:
        read(request, Nothing)
        await control.abort()
        return Response(status_code=204)

    def route(endpoint: Any) -> Route:
        async def told(request: Request) -> Response:
            try:
                return await endpoint(request)
            except RuntimeError as error:  # paused already, or not paused
                raise ApiError(409, str(error)) from error
            except StateDictError as error:
                raise ApiError(409, "no replica could pull this version; the server's log says why") from error

        return Route(f"{ADMIN_PREFIX}{endpoint.__name__}", told, methods=["POST"])

    return [route(endpoint) for endpoint in (pause, resume, pull, abort)]
