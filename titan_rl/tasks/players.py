"""Tasks with several seats, and the players of seats: the policy, scripts, endpoints, and served checkpoints."""

from __future__ import annotations

import asyncio
import os
import socket
import zlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    Tag,
    field_validator,
)
from pydantic_core import PydanticCustomError

from titan_rl.core.calls.imports import find_function
from titan_rl.core.calls.parsing import is_http_url, openai_base
from titan_rl.core.calls.retries import Backoff
from titan_rl.core.errors import ConfigError, GenerationError
from titan_rl.core.plain_data import plain_json
from titan_rl.core.settings import FilePath, FunctionName, Section
from titan_rl.rollout.environment.messages import MessageGame
from titan_rl.rollout.environment.types import MessagePlayer, Player, SeatedEnv, SeatedMessageEnv, TokenPlayer
from titan_rl.rollout.policy_text import continuing, joined, with_prefix_marked
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.task import RunContext
from titan_rl.rollout.types import Matched, Message, sample_alone
from titan_rl.tasks.league import LeagueSeat
from titan_rl.tasks.policy_servers import Opponents, new_log, open_opponents, serving

if TYPE_CHECKING:  # imported where it is used, because the import is slow and few seats need it
    import httpx


class Endpoint(Section):
    """Model behind OpenAI's chat protocol."""

    url: str = Field(min_length=1)
    """URL of the server, such as "https://api.openai.com", with or without the "/v1" at its end."""
    model: str = Field(min_length=1)
    """Name of the model at the endpoint."""
    api_key: str = "OPENAI_API_KEY"
    """Environment variable with the key, if the endpoint needs one."""
    max_tokens: PositiveInt | None = None
    """Most tokens of one answer; by default the endpoint's limit."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; by default the endpoint's."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of one answer, retries included."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        if not is_http_url(url):
            raise PydanticCustomError(
                "url", 'must begin with "http://" or "https://" and name a host, and no port above 65535'
            )
        return url


class FrozenPolicy(Section):
    """Frozen checkpoint that is served next to the run."""

    policy: FilePath = Field(min_length=1)
    """Folder of a run, whose newest checkpoint is used, of an export, or of a model. Its tokens must be those of the
    policy in training."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Settings of its server, such as {"generation.kv_cache_gib" = "0.5"}; `titan-rl serve --help` lists them."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; by default the policy's."""
    start_s: PositiveFloat = 300.0
    """Longest time until the server listens."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of one answer."""


def _kind(given: Any) -> str | None:
    """Tag of a setting in `PlayerSetting`. Error messages leave out parts in angle brackets, which are not keys."""
    if isinstance(given, str):
        return "<named>"
    kinds = ((Endpoint, "url", "<endpoint>"), (FrozenPolicy, "policy", "<frozen>"), (LeagueSeat, "league", "<league>"))
    for kind, key, tag in kinds:
        if isinstance(given, kind) or (isinstance(given, Mapping) and key in given):
            return tag
    return None


PlayerSetting = Annotated[
    Annotated[str, FunctionName(("policy",)), Tag("<named>")]
    | Annotated[Endpoint, Tag("<endpoint>")]
    | Annotated[FrozenPolicy, Tag("<frozen>")]
    | Annotated[LeagueSeat, Tag("<league>")],
    Discriminator(
        _kind,
        custom_error_type="player",
        custom_error_message=(
            'must be "policy", "module:function" of a script, {url = "...", model = "..."}, {policy = "folder"} or '
            '{league = "hard"}'
        ),
    ),
]
"""Player of a seat: "policy", the one in training; "module:function", a script that replies to messages; an endpoint;
a checkpoint; or frozen versions of this run."""


class SeatedTask(Section):
    """Base class of a `Task` with several seats: subclasses define `seat_names` and `game`, and `train_sample`,
    `validation_samples` and `rubric` of any task.

    Example:

        class Debates(SeatedTask):
            seat_names = ("pro", "contra")

            def game(self, sample):
                return Debate(sample)  # a SeatedMessageEnv
    """

    seat_names: ClassVar[tuple[str, ...]]
    """The seats of every game, in order."""

    seats: dict[str, PlayerSetting] = Field(default_factory=dict)
    """Player of each seat; by default the policy."""
    rotate: Literal["never", "sibling", "sample"] = "never"
    """Rotate the players by a seat from sibling to sibling, or from sample to sample. Advantages compare rollouts of
    one seat, so with "sibling" a seat has fewer of them to compare."""

    _opened: dict[str, Player] | None = PrivateAttr(None)
    _opponents: Opponents | None = PrivateAttr(None)

    @property
    def league(self) -> LeagueSeat | None:
        """Settings of the seats that frozen versions of this run play, if there are any."""
        return next((setting for setting in self.seats.values() if isinstance(setting, LeagueSeat)), None)

    def server_settings(self) -> dict[str, Mapping[str, str]]:
        """Settings of the servers of seats, by the names of the settings that hold them; see `ServingTask`."""
        return {
            f"task.seats.{seat}.settings": setting.settings
            for seat, setting in self.seats.items()
            if isinstance(setting, FrozenPolicy | LeagueSeat)
        }

    @abstractmethod
    def game(self, sample: Any) -> SeatedMessageEnv:
        """Make a fresh environment for one game of the sample."""

    def make_env(self, sample: Any, renderer: Renderer) -> SeatedEnv:
        opponent = sample.opponent if isinstance(sample, Matched) else None
        sample = sample_alone(sample)
        first = zlib.crc32(repr(sample).encode()) if self.rotate == "sample" else 0
        players: list[Player] = [self._player(seat, opponent) for seat in self.seat_names]

        def of_sibling(sibling: int) -> Mapping[str, Player]:
            moved = (first + sibling * (self.rotate == "sibling")) % len(players)
            return dict(zip(self.seat_names, players[moved:] + players[:moved], strict=True))

        return MessageGame(self.game(sample), renderer, of_sibling)

    def check_settings(self) -> None:
        """Check the names of the seats.

        Raises:
            ConfigError: a seat does not exist, the policy plays no seat, or two leagues have different settings.
        """
        if strange := sorted(self.seats.keys() - set(self.seat_names)):
            raise ConfigError(f"task.seats has {', '.join(strange)}; the seats are {', '.join(self.seat_names)}")
        if all(self.seats.get(seat, "policy") != "policy" for seat in self.seat_names):
            raise ConfigError('task.seats gives the policy no seat; set one of them to "policy"')
        leagues = [setting for setting in self.seats.values() if isinstance(setting, LeagueSeat)]
        if any(setting != leagues[0] for setting in leagues):
            raise ConfigError("task.seats has two different leagues; all seats of a league need the same settings")

    @asynccontextmanager
    async def open(self, run: RunContext) -> AsyncGenerator[None]:
        """Context in which endpoints are open, and checkpoints and versions are served. In a dry run the policy plays
        their seats."""
        if run.dry:
            self._opened = {seat: "policy" for seat, setting in self.seats.items() if not isinstance(setting, str)}
            yield
            return
        others = {seat: setting for seat, setting in self.seats.items() if not isinstance(setting, LeagueSeat)}
        async with AsyncExitStack() as stack:
            if self.league is not None and run.versions is not None:
                self._opponents = await stack.enter_async_context(open_opponents(self.league, run, run.versions))
            self._opened = await stack.enter_async_context(open_players(others, run))
            try:
                yield
            finally:
                self._opened = self._opponents = None

    def _player(self, seat: str, opponent: int | None) -> Player:
        if self._opened is not None and seat in self._opened:
            return self._opened[seat]
        setting = self.seats.get(seat, "policy")
        if isinstance(setting, LeagueSeat):
            if opponent is None:
                return "policy"
            if self._opponents is None:
                raise RuntimeError(f"seat {seat!r} is played by version {opponent}, which only answers in a run")
            return self._opponents.player(opponent)
        if not isinstance(setting, str):
            raise RuntimeError(f"seat {seat!r} is played by another model, which only answers while the task is open")
        return _named_player(seat, setting)


def _named_player(seat: str, setting: str) -> Player:
    return "policy" if setting == "policy" else MessagePlayer(find_function(f"task.seats.{seat}", setting, {}))


@asynccontextmanager
async def open_players(settings: Mapping[str, PlayerSetting], run: RunContext) -> AsyncGenerator[dict[str, Player]]:
    """Context in which the players of seats are open. A checkpoint that plays several seats is served once.

    Raises:
        ConfigError: a script is missing.
        GenerationError: a checkpoint cannot be served.
    """
    async with AsyncExitStack() as stack:
        served: list[tuple[FrozenPolicy, Player]] = []
        players: dict[str, Player] = {}
        for seat, setting in settings.items():
            known: Player | None = next((player for of, player in served if of == setting), None)
            players[seat] = known or await _open(seat, setting, run, stack)
            if isinstance(setting, FrozenPolicy) and known is None:
                served.append((setting, players[seat]))
        yield players


async def _open(seat: str, setting: PlayerSetting, run: RunContext, stack: AsyncExitStack) -> Player:
    if isinstance(setting, str):
        return _named_player(seat, setting)
    if isinstance(setting, Endpoint):
        endpoint = EndpointPlayer(setting)
        stack.push_async_callback(endpoint.close)
        return MessagePlayer(endpoint.reply, timeout_s=setting.timeout_s)
    if isinstance(setting, LeagueSeat):
        raise ConfigError(f"seat {seat!r} is played by versions of the run, which only a SeatedTask opens")
    from titan_rl.serving.client import HttpGenerateFn

    log = new_log(run.folder / "logs", f"player-{seat}-{socket.gethostname()}-{os.getpid()}")
    run.tell(f"seat {seat!r} is played by {setting.policy}, which is being served; log: {log}")
    starting = serving(
        setting.policy,
        log,
        max_context=run.max_context,
        settings=setting.settings,
        start_s=setting.start_s,
        timeout_s=setting.timeout_s,
        run=run.folder,
        console=run.console,
    )
    served = await stack.enter_async_context(starting)
    generate = HttpGenerateFn(served.url, api_key=served.api_key, timeout_s=setting.timeout_s)
    await stack.enter_async_context(generate)
    return TokenPlayer(generate, temperature=setting.temperature, timeout_s=setting.timeout_s)


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


class EndpointPlayer:
    """Player behind an endpoint of OpenAI's chat protocol. Transient failures, such as a full or unreachable server,
    are retried until the time is up.

    Args:
        settings: Settings of the endpoint.
        transport: httpx transport for tests.
    """

    def __init__(self, settings: Endpoint, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        import httpx

        self._settings = settings
        key = os.environ.get(settings.api_key)
        self._url = f"{openai_base(settings.url)}/chat/completions"
        self._transient = httpx.TransportError
        self._client = httpx.AsyncClient(
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=settings.timeout_s,
            transport=transport,
        )

    async def reply(self, messages: Sequence[Message]) -> Message:
        """Request an answer.

        Raises:
            GenerationError: the endpoint refuses the request, or its answer is not a message.
            TimeoutError: the endpoint has not answered in time.
        """
        limits = {"max_tokens": self._settings.max_tokens, "temperature": self._settings.temperature}
        wired = joined(with_prefix_marked(messages))
        body = {"model": self._settings.model, "messages": [plain_json(message) for message in wired]}
        body |= continuing(messages)
        body |= {name: value for name, value in limits.items() if value is not None}
        async with asyncio.timeout(self._settings.timeout_s):
            response = await self._post(body)
        try:
            message = response.json()["choices"][0]["message"]
            return {"role": "assistant", "content": str(message.get("content") or "")}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise GenerationError(f"{self._url} sent an answer that is not a message: {error!r}") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)  # the caller limits the time
        while True:
            with suppress(self._transient):
                response = await self._client.post(self._url, json=body)
                if response.status_code == 200:
                    return response
                if response.status_code != 429 and response.status_code < 500:
                    raise GenerationError(f"{self._url} answered {response.status_code}: {response.text[:200]}")
            await backoff.pause()
