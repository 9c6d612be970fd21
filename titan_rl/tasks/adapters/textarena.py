"""Games of `textarena`: single-player games as environments, others with a seat for each player."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
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
from titan_rl.rollout.policy_text import answer_of
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.reward import env_reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import RolloutStatus
from titan_rl.tasks.adapters.shared import check_name, train_seed, validation_seed
from titan_rl.tasks.players import SeatedTask
from titan_rl.tasks.tools import messages_of

MOST_PLAYERS = 16
WRONG_NUMBER = (AssertionError, ValueError, LookupError, TypeError)  # raised by games for a wrong number of players

_one_at_a_time = threading.Lock()
"""Lock of the calls of games. They draw from Python's global random generator, whose state is replaced by the game's
own during a call."""


class _CannotBeginError(ConfigError):
    """A game was made, but does not begin."""


class ArenaGame:
    """New game with its own random numbers. Its methods may block.

    Raises:
        ConfigError: the game cannot be made or cannot begin.
    """

    def __init__(self, task: TextArena, num_players: int, seed: int) -> None:
        self._randomness: Any = None  # state of the game's own random generator
        # last text of wrappers by player; each observation repeats the whole text
        self._last_observation: dict[int, str] = {}
        self.invalid_moves = dict.fromkeys(range(num_players), 0)
        self.done = False
        self._game = make_game(task.env_id, dict(task.options), task.wrappers)
        try:
            with self._own_randomness():
                self._game.reset(num_players=num_players, seed=seed)
        except Exception as error:
            raise _CannotBeginError(
                f"a game of {num_players} players with seed {seed} cannot begin: {summary(error)}"
            ) from error

    def observe(self) -> tuple[int, str]:
        """Player whose turn it is, and the text of that player's new observations."""
        with self._own_randomness():
            player, seen = self._game.get_observation()
        if isinstance(seen, str):
            before, self._last_observation[player] = self._last_observation.get(player, ""), seen
            return player, seen.removeprefix(before).strip()
        return player, self._text(player, cast("Sequence[tuple[int, str, Any]]", seen))

    def move(self, player: int, action: str) -> None:
        errors = getattr(self._game.state, "error_count", 0)
        with self._own_randomness():
            self.done, _ = self._game.step(action=action)
        self.invalid_moves[player] += getattr(self._game.state, "error_count", 0) > errors

    def end(self) -> dict[int, dict[str, float]]:
        """Rewards of each player, by name. Call when the game is done."""
        with self._own_randomness():
            rewards, about = self._game.close()
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
        """Text of a player's observations since its last move."""
        return self._text(player, self._game.state.observations.get(player, ()))

    def _text(self, player: int, seen: Sequence[tuple[int, str, Any]]) -> str:
        names = self._game.state.role_mapping
        return "\n".join(f"[{names.get(speaker, speaker)}] {text}" for speaker, text, _ in seen if speaker != player)

    @contextmanager
    def _own_randomness(self) -> Generator[None]:
        with _one_at_a_time:
            others = random.getstate()
            if self._randomness is not None:
                random.setstate(self._randomness)
            try:
                yield
            finally:
                self._randomness = random.getstate()
                random.setstate(others)


def make_game(name: str, options: dict[str, Any], wrappers: Sequence[str]) -> Any:
    """Make a game with its wrappers.

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
    except (Exception, SyntaxError) as error:  # some games need a newer Python, word lists or API keys
        raise ConfigError(f"task.env_id = {name!r} cannot be made: {summary(error)}") from error
    return game


def least_players(task: TextArena) -> int:
    """Find the smallest number of players with which a game begins.

    Raises:
        ConfigError: the game cannot be made, or does not begin with any number of players.
    """
    failure: Exception | None = None
    for number in range(1, MOST_PLAYERS + 1):
        try:
            ArenaGame(task, number, seed=0)
        except _CannotBeginError as error:
            if not isinstance(error.__cause__, WRONG_NUMBER):
                raise
            failure = error
        else:
            return number
    raise ConfigError(f"task.env_id = {task.env_id!r}: {failure}; set task.num_players")


class TextArena(SeatedTask):
    """Game of textarena. A game of several players has the seats `player_0`, `player_1` and so on, whose players are
    those of `seats`.

    Example:

        [task]
        type = "titan_rl.tasks.adapters.textarena:TextArena"
        env_id = "TicTacToe-v0-raw"
        rotate = "sample"

        [task.seats]
        player_1 = "players:first_free"

    A sample is the seed of a game: even for training, odd for validation.
    """

    env_id: str
    """Name of the game in textarena. Games that end in -raw show each player what happened since its last move; others
    show the text that their wrappers make of the whole game."""
    options: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments of the environment of the game."""
    wrappers: tuple[str, ...] = ()
    """Further wrappers of textarena.wrappers, the outermost last, such as ActionFormattingWrapper."""
    num_players: PositiveInt | None = None
    """Number of players; by default the least that the game takes."""
    lost_reward: float = -1.0
    """Reward of a rollout that is cut off before its game has ended, and of an answer that cannot be parsed."""

    _least_players: list[int] = PrivateAttr(default_factory=list[int])  # empty until it is known

    @property
    def seat_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Seats of the game.

        Raises:
            ConfigError: the game does not begin with any number of players.
        """
        if not self._least_players:
            self._least_players.append(self.num_players or least_players(self))
        return tuple(map(_seat, range(self._least_players[0])))

    def check_settings(self) -> None:
        """Begin a game.

        Raises:
            ConfigError: there is no such game, it cannot be played, or it does not have a seat.
            MissingExtraError: textarena is not installed.
        """
        self.begin({"seed": 0})
        super().check_settings()

    def train_sample(self, seed: int, index: int) -> dict[str, int]:
        return {"seed": train_seed(seed, index)}

    def validation_samples(self, count: int) -> list[dict[str, int]]:
        return [{"seed": validation_seed(index)} for index in range(count)]

    def env(self, sample: Mapping[str, int]) -> MessageEnv:
        """Environment of a single-player game."""
        return cast("MessageEnv", ThreadedEnv(partial(_Alone, self, sample)))

    def game(self, sample: Mapping[str, int]) -> SeatedMessageEnv:
        """Environment of a game with several players."""
        return _Together(self, sample)

    def make_env(self, sample: Mapping[str, int], renderer: Renderer) -> TokenEnv | SeatedEnv:  # pyright: ignore[reportIncompatibleMethodOverride]
        if len(self.seat_names) == 1:
            return MessageTokenEnv(self.env(sample), renderer)
        return super().make_env(sample, renderer)

    def rubric(self) -> Rubric:
        """Rubric of the game's own reward. The number of a player's invalid moves, and whether one ended the game, are
        recorded with it."""
        return Rubric(
            [env_reward("reward"), env_reward("invalid_moves", 0.0), env_reward("ended_by_invalid_move", 0.0)],
            truncated_reward=self.lost_reward,
            error_reward=self.lost_reward,
        )

    def begin(self, sample: Mapping[str, int]) -> ArenaGame:
        """Begin the game of a sample; may block."""
        return ArenaGame(self, len(self.seat_names), sample["seed"])


class _Alone:
    """A `MessageEnv` of a game of one player. It blocks."""

    def __init__(self, task: TextArena, sample: Mapping[str, int]) -> None:
        self._game = task.begin(sample)

    def reset(self) -> MessageObservation:
        return MessageObservation(messages_of(self._game.observe()[1]))

    def step(self, message: Mapping[str, Any]) -> MessageStep:
        self._game.move(0, answer_of(message).strip())
        if self._game.done:
            last_words = self._game.last_words(0)
            messages = messages_of(last_words) if last_words else []
            return MessageStep(messages, status=RolloutStatus.COMPLETED, rewards=self._game.end()[0])
        return MessageStep(messages_of(self._game.observe()[1]))

    def close(self) -> None: ...


class _Together:
    """A `SeatedMessageEnv` of a game of several players."""

    def __init__(self, task: TextArena, sample: Mapping[str, int]) -> None:
        self._task = task
        self._sample = sample

    async def play_seats(self, seats: Mapping[str, MessageSeat]) -> None:
        game = await in_thread(self._task.begin, self._sample)
        while not game.done:
            player, seen = await in_thread(game.observe)
            answer = await seats[_seat(player)].ask(messages_of(seen))
            await in_thread(game.move, player, answer_of(answer).strip())
        for player, rewards in (await in_thread(game.end)).items():
            if last_words := game.last_words(player):
                seats[_seat(player)].tell(messages_of(last_words))
            for name, value in rewards.items():
                seats[_seat(player)].reward(name, value)

    async def close(self) -> None: ...


def _seat(player: int) -> str:
    return f"player_{player}"
