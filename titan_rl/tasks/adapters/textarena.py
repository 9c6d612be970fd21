"""Games of `textarena`: single-player games as environments, others with a seat for each player."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from pydantic import Field, PositiveInt, PrivateAttr

from titan_rl.core.calls.imports import require
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import ConfigError
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.environment.threaded import ThreadedEnv
from titan_rl.rollout.environment.types import (
    MessageEnv,
    MessageObservation,
    MessageSeat,
    MessageStep,
    SeatedEnv,
    SeatedMessageEnv,
    TokenEnv,
)
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.reward import env_reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import RolloutStatus
from titan_rl.tasks.adapters.names import check_name
from titan_rl.tasks.adapters.seeds import train_seed, validation_seed
from titan_rl.tasks.players.task import SeatedTask

MOST_PLAYERS = 16
WRONG_NUMBER = (AssertionError, ValueError, LookupError, TypeError)  # what games raise for a number of players

_one_at_a_time = threading.Lock()
"""Games draw from Python's one generator of random numbers; each is lent its own while it is asked."""


class _CannotBeginError(ConfigError):
    """A game was made, and does not begin."""


class ArenaGame:
    """A new game with its own random numbers. Its methods may block.

    Args:
        make: makes the game.

    Raises:
        ConfigError: the game cannot start.
    """

    def __init__(self, make: Callable[[], Any], num_players: int, *, seed: int) -> None:
        self._randomness: Any = None  # the state of the game's own generator
        self._said: dict[int, str] = {}  # of wrappers, which say it all each time
        self.invalid_moves = dict.fromkeys(range(num_players), 0)
        self.done = False
        self._game = make()
        try:
            self._ask(lambda: self._game.reset(num_players=num_players, seed=seed))
        except Exception as error:
            raise _CannotBeginError(
                f"a game of {num_players} players with seed {seed} cannot begin: {summary(error)}"
            ) from error

    def observe(self) -> tuple[int, str]:
        """Player whose turn it is, and the new observations of that player."""
        player, seen = self._ask(self._game.get_observation)
        if isinstance(seen, str):
            before, self._said[player] = self._said.get(player, ""), seen
            return player, seen.removeprefix(before).strip()
        return player, self._text(player, cast("Sequence[tuple[int, str, Any]]", seen))

    def move(self, player: int, action: str) -> None:
        errors = getattr(self._game.state, "error_count", 0)
        self.done, _ = self._ask(lambda: self._game.step(action=action))
        self.invalid_moves[player] += getattr(self._game.state, "error_count", 0) > errors

    def end(self) -> dict[int, dict[str, float]]:
        """The rewards of each player, when the game is done."""
        rewards, about = self._ask(self._game.close)
        won = cast("dict[int, float]", rewards or {})
        return {
            player: {
                "reward": float(won.get(player, 0.0)),
                "invalid_moves": float(count),
                "ended_by_invalid_move": float(about[player].get("invalid_move", False)),
            }
            for player, count in self.invalid_moves.items()
        }

    def last_words(self, player: int) -> str:
        """Observations of a player since its last move."""
        return self._text(player, self._game.state.observations.get(player, ()))

    def _text(self, player: int, seen: Sequence[tuple[int, str, Any]]) -> str:
        names = self._game.state.role_mapping
        return "\n".join(f"[{names.get(speaker, speaker)}] {text}" for speaker, text, _ in seen if speaker != player)

    def _ask(self, call: Callable[[], Any]) -> Any:
        with _one_at_a_time:
            others = random.getstate()
            if self._randomness is not None:
                random.setstate(self._randomness)
            try:
                return call()
            finally:
                self._randomness = random.getstate()
                random.setstate(others)


def make_game(name: str, options: dict[str, Any], wrappers: Sequence[str]) -> Any:
    """
    Raises:
        ConfigError: there is no such game, or it cannot be made.
    """
    arena = require("textarena", "textarena")
    check_name(
        "task.env_id", name, require("textarena.envs.registration", "textarena").ENV_REGISTRY, "games of textarena"
    )
    listed = cast("dict[str, Any]", vars(arena.wrappers))
    known: dict[str, Any] = {kind: found for kind, found in listed.items() if inspect.isclass(found)}
    for wrapper in wrappers:
        check_name("task.wrappers", wrapper, known, "wrappers of textarena")
    try:
        game: Any = arena.make(name, **options)
        for wrapper in wrappers:
            game = known[wrapper](game)
    except (Exception, SyntaxError) as error:  # some games are of newer Pythons, or want word lists or keys
        raise ConfigError(f"task.env_id = {name!r} cannot be made: {summary(error)}") from error
    return game


def least_players(game: str, make: Callable[[], Any]) -> int:
    """
    Raises:
        ConfigError: the game cannot be made, or begins with no number of players.
    """
    make()
    failure: Exception | None = None
    for number in range(1, MOST_PLAYERS + 1):
        try:
            ArenaGame(make, number, seed=0)
        except _CannotBeginError as error:
            if not isinstance(error.__cause__, WRONG_NUMBER):
                raise
            failure = error
        else:
            return number
    raise ConfigError(f"task.env_id = {game!r}: {failure}; set task.num_players")


class TextArena(SeatedTask):
    """A game of textarena. One of several players has the seats `player_0`, `player_1` and so on, each played by whom
    `seats` names.

    Example:

        [task]
        type = "titan_rl.tasks.adapters.textarena:TextArena"
        env_id = "TicTacToe-v0-raw"
        rotate = "sample"

        [task.seats]
        player_1 = "players:first_free"

    Samples are a game's seed; training has even seeds, and validation odd ones.
    """

    env_id: str
    """Its name in textarena. Those that end in -raw tell each player what has happened since its last move; others say
    what their wrappers make of the whole game."""
    options: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    """Wrappers of the game, besides or instead of those of its name."""
    wrappers: tuple[str, ...] = ()
    """More of textarena.wrappers, the outermost last, such as ActionFormattingWrapper."""
    num_players: PositiveInt | None = None
    """By default the least that the game takes."""
    lost_reward: float = -1.0
    """Of a rollout that is cut off before its game has ended, and of an answer that cannot be parsed."""

    _least_players: list[int] = PrivateAttr(default_factory=list[int])  # once it is known

    @property
    def seat_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """
        Raises:
            ConfigError: the game begins with no number of players.
        """
        if not self._least_players:
            self._least_players.append(self.num_players or least_players(self.env_id, self._make))
        return tuple(map(_seat, range(self._least_players[0])))

    def check_settings(self) -> None:
        """
        Raises:
            ConfigError: there is no such game, it cannot be played, or a seat is not there.
            MissingExtraError: textarena is not installed.
        """
        self._begin({"seed": 0})()
        super().check_settings()

    def train_sample(self, seed: int, index: int) -> dict[str, int]:
        return {"seed": train_seed(seed, index)}

    def validation_samples(self, count: int) -> list[dict[str, int]]:
        return [{"seed": validation_seed(index)} for index in range(count)]

    def env(self, sample: Mapping[str, int]) -> MessageEnv:
        """Environment of a single-player game."""
        return cast("MessageEnv", ThreadedEnv(partial(_Alone, self._begin(sample))))

    def game(self, sample: Mapping[str, int]) -> SeatedMessageEnv:
        """Environment of a game with several players."""
        return _Together(self._begin(sample))

    def make_env(self, sample: Mapping[str, int], renderer: Renderer) -> TokenEnv | SeatedEnv:  # pyright: ignore[reportIncompatibleMethodOverride]
        if len(self.seat_names) == 1:
            return MessageTokenEnv(self.env(sample), renderer)
        return super().make_env(sample, renderer)

    def rubric(self) -> Rubric:
        """The game's own reward; how often a player made an invalid move, and whether that ended the game, are
        recorded beside it."""
        return Rubric(
            [env_reward("reward"), env_reward("invalid_moves", 0.0), env_reward("ended_by_invalid_move", 0.0)],
            truncated_reward=self.lost_reward,
            error_reward=self.lost_reward,
        )

    def _begin(self, sample: Mapping[str, int]) -> Callable[[], ArenaGame]:
        return partial(ArenaGame, self._make, len(self.seat_names), seed=sample["seed"])

    def _make(self) -> Any:
        return make_game(self.env_id, dict(self.options), self.wrappers)


class _Alone:
    """A `MessageEnv` of a game of one player. It blocks."""

    def __init__(self, begin: Callable[[], ArenaGame]) -> None:
        self._game = begin()

    def reset(self) -> MessageObservation:
        return MessageObservation([_user(self._game.observe()[1])])

    def step(self, message: Mapping[str, Any]) -> MessageStep:
        self._game.move(0, _action(message))
        if self._game.done:
            said = self._game.last_words(0)
            told = [_user(said)] if said else []
            return MessageStep(told, status=RolloutStatus.COMPLETED, rewards=self._game.end()[0])
        return MessageStep([_user(self._game.observe()[1])])

    def close(self) -> None: ...


class _Together:
    """A `SeatedMessageEnv`."""

    def __init__(self, begin: Callable[[], ArenaGame]) -> None:
        self._begin = begin

    async def play_seats(self, seats: Mapping[str, MessageSeat]) -> None:
        game = await in_thread(self._begin)
        while not game.done:
            player, seen = await in_thread(game.observe)
            answer = await seats[_seat(player)].ask([_user(seen)])
            await in_thread(game.move, player, _action(answer))
        for player, rewards in (await in_thread(game.end)).items():
            if said := game.last_words(player):
                seats[_seat(player)].tell([_user(said)])
            for name, value in rewards.items():
                seats[_seat(player)].reward(name, value)

    async def close(self) -> None: ...


def _seat(player: int) -> str:
    return f"player_{player}"


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _action(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "").strip()
