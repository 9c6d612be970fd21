"""What a harness tells of its episode: that it begins, what it is worth, and that it is over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from titan_rl.core.calls.plain import plain_json
from titan_rl.rollout.types import RolloutStatus
from titan_rl.serving.episodes.episode import Episode
from titan_rl.serving.http.api_error import ApiError
from titan_rl.serving.http.body import Body, read

EPISODES = "/episodes"


class OpenBody(Body):
    wait_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Longest wait for a sample to play, where there is none at once."""


class RewardBody(Body):
    rewards: Annotated[dict[Annotated[str, Field(max_length=256)], float], Field(max_length=256)]
    completion_id: str | None = None
    """The `id` of the answer that they are for; without it they are for the whole."""
    index: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Which of its choices."""


class EndBody(Body):
    status: Literal[
        "completed", "truncated_length", "truncated_turns", "truncated_time", "error_parse", "error_env"
    ] = "completed"
    error: Annotated[str, Field(max_length=16_384)] | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """
    Args:
        sample: what the episode is about, where whoever opens episodes says so.
    """

    episode: Episode
    sample: Any = None


Open = Callable[[float], Awaitable[Opened]]
"""Opens an episode for a harness that asks for one and would wait so many seconds.

Raises:
    BusyError: there is none to be had; later there may be.
    ApiError: 503, there will be none any more.
"""


def episode_url(base_url: str, episode: Episode) -> str:
    """
    Args:
        base_url: of the server: "http://127.0.0.1:8000".
    """
    return f"{base_url.rstrip('/')}{EPISODES}/{episode.id}"


def episode_routes(open_episode: Open) -> list[Route]:
    """`POST /episodes` for who may call the server, and the rest of it for the key of the episode in the path."""

    async def begin(request: Request) -> Response:
        body = read(request, OpenBody)
        opened = await open_episode(body.wait_s)
        told = {
            "id": opened.episode.id,
            "key": opened.episode.key,
            "base_url": episode_url(str(request.base_url), opened.episode),
            "sample": plain_json(opened.sample),
        }
        return JSONResponse(told, headers={"cache-control": "no-store"})

    async def show(request: Request) -> Response:
        episode = _episode_of(request)
        return JSONResponse(
            {
                "id": episode.id,
                "status": "open" if episode.status is None else str(episode.status),
                "num_turns": episode.num_turns,
                "num_in_flight": episode.num_in_flight,
            }
        )

    async def reward(request: Request) -> Response:
        body = read(request, RewardBody)
        try:
            _episode_of(request).reward(body.rewards, body.completion_id, body.index)
        except LookupError as error:
            raise ApiError(404, str(error.args[0]), param="completion_id", code="unknown_completion") from None
        return JSONResponse({})

    async def end(request: Request) -> Response:
        body, episode = read(request, EndBody), _episode_of(request)
        if not episode.end(RolloutStatus(body.status), body.error):
            raise ApiError(410, f"the episode is over: {episode.status}", code="episode_ended")
        return JSONResponse({})

    return [
        Route(EPISODES, begin, methods=["POST"]),
        Route(f"{EPISODES}/{{id}}", show, methods=["GET"]),
        Route(f"{EPISODES}/{{id}}/reward", reward, methods=["POST"]),
        Route(f"{EPISODES}/{{id}}/end", end, methods=["POST"]),
    ]


def _episode_of(request: Request) -> Episode:
    """A request that has come so far on this path has the episode's key."""
    caller = request.scope["caller"]
    assert isinstance(caller, Episode)
    return caller
