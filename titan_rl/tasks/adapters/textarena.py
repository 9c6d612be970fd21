"""The games of `textarena`: one player's as environments, others with a seat for each player."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from pydantic import Field, PositiveInt, PrivateAttr

from titan_rl.core.calls.threads import in_thread
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.environment.seats import MessageSeat, SeatedEnv, SeatedMessageEnv
from titan_rl.rollout.environment.threaded import ThreadedEnv
from titan_rl.rollout.environment.types import MessageEnv, MessageObservation, MessageStep, TokenEnv
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.reward import env_reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import RolloutStatus
from titan_rl.tasks.adapters.seeds import train_seed, validation_seed
from titan_rl.tasks.adapters.textarena_game import ArenaGame, least_players, make_game
from titan_rl.tasks.players.task import SeatedTask


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
    """Of the game, beside or instead of those that go with its name."""
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
        """Of a game of one player."""
        return cast("MessageEnv", ThreadedEnv(partial(_Alone, self._begin(sample))))

    def game(self, sample: Mapping[str, int]) -> SeatedMessageEnv:
        """Of several."""
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
