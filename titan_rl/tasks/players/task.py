"""Task whose environments have several seats, with the players that its settings name."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from titan_rl.core.calls.imports import find_function
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section
from titan_rl.rollout.environment.messages import MessageGame
from titan_rl.rollout.environment.types import MessagePlayer, Player, SeatedEnv, SeatedMessageEnv
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.task import RunContext
from titan_rl.tasks.players.settings import PlayerSetting


class SeatedTask(Section):
    """Base class of a `Task` with several seats, which defines their names and the game of a sample. Subclasses also
    define `train_sample`, `validation_samples` and `rubric`, like any task.

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

    @abstractmethod
    def game(self, sample: Any) -> SeatedMessageEnv:
        """A fresh environment for one game of the sample."""

    def make_env(self, sample: Any, renderer: Renderer) -> SeatedEnv:
        first = zlib.crc32(repr(sample).encode()) if self.rotate == "sample" else 0
        players: list[Player] = [self._player(seat) for seat in self.seat_names]

        def of_sibling(sibling: int) -> Mapping[str, Player]:
            moved = (first + sibling * (self.rotate == "sibling")) % len(players)
            return dict(zip(self.seat_names, players[moved:] + players[:moved], strict=True))

        return MessageGame(self.game(sample), renderer, of_sibling)

    def check_settings(self) -> None:
        """
        Raises:
            ConfigError: a seat is not there, or the policy plays none.
        """
        if strange := sorted(self.seats.keys() - set(self.seat_names)):
            raise ConfigError(f"task.seats has {', '.join(strange)}; the seats are {', '.join(self.seat_names)}")
        if all(self.seats.get(seat, "policy") != "policy" for seat in self.seat_names):
            raise ConfigError('task.seats leaves the policy none; give one of them "policy"')

    @asynccontextmanager
    async def open(self, run: RunContext) -> AsyncGenerator[None]:
        """Endpoints and checkpoints answer, for the length of the block. In a dry run the policy plays for them."""
        if run.dry:
            self._opened = {seat: "policy" for seat, setting in self.seats.items() if not isinstance(setting, str)}
            yield
            return
        from titan_rl.tasks.players.opened import open_players  # it needs what speaks HTTP, which few seats do

        async with open_players(self.seats, run) as self._opened:
            try:
                yield
            finally:
                self._opened = None

    def _player(self, seat: str) -> Player:
        if self._opened is not None and seat in self._opened:
            return self._opened[seat]
        setting = self.seats.get(seat, "policy")
        if not isinstance(setting, str):
            raise RuntimeError(f"seat {seat!r} is played by another model, which answers while the task is open")
        return "policy" if setting == "policy" else MessagePlayer(find_function(f"task.seats.{seat}", setting, {}))
