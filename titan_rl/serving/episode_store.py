"""Open episodes of a server by key, and the endpoints through which a harness opens, rewards and ends an episode."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from titan_rl.core.errors import BusyError
from titan_rl.core.plain_data import plain_json
from titan_rl.generation.continuation import RequestFn
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import RolloutStatus
from titan_rl.serving.episode import Episode, EpisodeLimits
from titan_rl.serving.http.errors import ApiError
from titan_rl.serving.http.request import Body, read
from titan_rl.types import SamplingParams


class EpisodeStore:
    """Episodes of a server by key.

    Args:
        renderer: Renderer of the episodes that are opened.

    A key is looked up by a digest that no client can predict, so that the time of a look-up reveals nothing about other
    keys. Each key opens only one episode.

    Example:

        store = EpisodeStore(renderer)
        episode = store.open("g17.3")
        store.find(episode.key) is episode          # True
        episode.end()
        len(store)                                  # 0
    """

    def __init__(self, renderer: Renderer | None, limits: EpisodeLimits | None = None) -> None:
        self.renderer = renderer
        self._limits = limits or EpisodeLimits()
        self._secret = secrets.token_bytes(32)
        self._by_key: dict[bytes, Episode] = {}
        self._num_open = 0

    def __len__(self) -> int:
        """Number of open episodes."""
        return self._num_open

    def open(
        self,
        episode_id: str,
        *,
        stream: RequestFn | None = None,
        sampling: SamplingParams | None = None,
        session_id: str | None = None,
        max_turns: int | None = None,
    ) -> Episode:
        """Open a new episode. The caller has to end it; otherwise its time limit does.

        Args:
            stream, sampling, session_id: See `Episode`.
            max_turns: Maximum number of turns. Defaults to the store's limit.

        Raises:
            BusyError: The maximum number of episodes is open.
            ValueError: The id is not valid.
        """
        if self._num_open >= self._limits.episodes:
            raise BusyError(f"{self._num_open} episodes are open, which is the limit")
        episode = Episode(
            episode_id,
            self.renderer,
            self._limits if max_turns is None else replace(self._limits, turns=max_turns),
            stream=stream,
            sampling=sampling,
            session_id=session_id,
            on_end=lambda: self._ended(digest),
        )
        digest = self._digest(episode.key)
        self._by_key[digest] = episode
        self._num_open += 1
        return episode

    def find(self, key: str) -> Episode | None:
        """Return the episode with this key, also for a while after its end; None if there is none."""
        episode = self._by_key.get(self._digest(key))
        if episode is None or not hmac.compare_digest(episode.key.encode(), key.encode("utf-8", "replace")):
            return None
        return episode

    def _ended(self, digest: bytes) -> None:
        self._num_open -= 1
        asyncio.get_running_loop().call_later(self._limits.keep_s, self._by_key.pop, digest)

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode("utf-8", "replace"), key=self._secret, digest_size=32).digest()


EPISODES = "/episodes"


class OpenBody(Body):
    wait_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Longest wait for a sample, in seconds, if none is available at once."""


class RewardBody(Body):
    rewards: Annotated[dict[Annotated[str, Field(max_length=256)], float], Field(max_length=256)]
    completion_id: str | None = None
    """The `id` of the answer that the rewards are for. Without it they are for the whole episode."""
    index: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Index of the choice."""


class EndBody(Body):
    status: Literal[
        "completed", "truncated_length", "truncated_turns", "truncated_time", "error_parse", "error_env"
    ] = "completed"
    error: Annotated[str, Field(max_length=16_384)] | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """An episode that was opened for a harness.

    Args:
        sample: Subject of the episode, if the function that opens episodes provides one.
    """

    episode: Episode
    sample: Any = None


Open = Callable[[float], Awaitable[Opened]]
"""Opens an episode for a harness that would wait for the given number of seconds.

Raises:
    BusyError: None is available now; later there may be.
    ApiError: With status 503 if there will be none any more.
"""


def episode_url(base_url: str, episode: Episode) -> str:
    """URL of an episode.

    Args:
        base_url: URL of the server, for example "http://127.0.0.1:8000".
    """
    return f"{base_url.rstrip('/')}{EPISODES}/{episode.id}"


def episode_routes(open_episode: Open) -> list[Route]:
    """Make the routes of episodes: `POST /episodes` for clients, the others for the key of the episode in the path."""

    async def begin(request: Request) -> Response:
        body = read(request, OpenBody)
        opened = await open_episode(body.wait_s)
        opened_fields = {
            "id": opened.episode.id,
            "key": opened.episode.key,
            "base_url": episode_url(str(request.base_url), opened.episode),
            "sample": plain_json(opened.sample),
        }
        return JSONResponse(opened_fields, headers={"cache-control": "no-store"})

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
    """Return the episode of a request. The admission has checked that the request has the key of an episode."""
    caller = request.scope["caller"]
    assert isinstance(caller, Episode)
    return caller
