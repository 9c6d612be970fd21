"""What is known of a trainer in processes of its own: that they may die, and that others can take their place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from titan_rl.training.protocol import Trainer


class MortalTrainer(Trainer, Protocol):
    """Once one of its processes is gone each call raises an `ActorDiedError`.

    Attributes:
        excused: it ends because its host goes, or is gone, and not by what it is at.
    """

    @property
    def excused(self) -> bool: ...

    async def ended(self) -> str:
        """Returns once that is so: why."""
        ...

    def end(self, reason: str) -> None:
        """Whatever is left of it ends, and its calls fail. One that has ended stays so."""
        ...


class TrainerGroup(Protocol):
    """The processes of a trainer, and those that take their place.

    Attributes:
        before_leaving: returns once what is trained by now is saved. Called before a trainer leaves its host.
        waits_for: what a restart needs that is not there; "" where it lacks nothing.
    """

    before_leaving: Callable[[], Awaitable[object]]
    waits_for: str

    @property
    def trainer(self) -> MortalTrainer:
        """Of the newest."""
        ...

    async def restart(self) -> MortalTrainer:
        """Another one, which has loaded the model, once nothing is left of the one before.

        Raises:
            ActorDiedError: it did not start.
            NoHostError: there was no host for it in time.
        """
        ...


def lacks_of(group: TrainerGroup | None) -> str:
    """What a trainer waits for that is to start again; "" where it does not."""
    return f"it waits for {group.waits_for}" if group and group.waits_for else ""
