"""One game of `textarena`, with random numbers of its own."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from titan_rl.core.calls.imports import require
from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import ConfigError
from titan_rl.tasks.adapters.names import check_name

MOST_PLAYERS = 16
WRONG_NUMBER = (AssertionError, ValueError, LookupError, TypeError)  # what games raise for a number of players

_one_at_a_time = threading.Lock()
"""Games draw from Python's one generator of random numbers; each is lent its own while it is asked."""


class _CannotBeginError(ConfigError):
    """A game was made, and does not begin."""


class ArenaGame:
    """One game, from its beginning. Its methods may block.

    Args:
        make: makes the game.

    Raises:
        ConfigError: it cannot begin.
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
        """Whose turn it is, and what is new to that player."""
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
        """What the game has told a player since its last move."""
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
