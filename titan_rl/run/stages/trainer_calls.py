"""Calls that change the trainer or save it: they are finished also where the run is stopped meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar, runtime_checkable

from titan_rl.core.calls.cancellation import stray_cancellation_fails
from titan_rl.training.protocol import Trainer

logger = logging.getLogger(__name__)

R = TypeVar("R")


@runtime_checkable
class Recovers(Protocol):
    """What is asked of a trainer that is started again when it dies."""

    def give_up(self) -> None:
        """The run ends: it is started no more, and what waits for that fails."""
        ...

    def waits_for(self) -> str:
        """What has to happen for calls to go on; "" while nothing has to."""
        ...


class TrainerCalls:
    """One at a time. The trainer goes on with a call whose caller is cancelled, and so does what awaits it here: only
    when it has ended the version is known.

    Args:
        trainer: that is called.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._call: asyncio.Future[Any] | None = None

    @property
    def running(self) -> bool:
        return self._call is not None and not self._call.done()

    def waits_for(self) -> list[str]:
        """What the trainer has to do, as far as that is known."""
        if isinstance(self._trainer, Recovers) and (lacks := self._trainer.waits_for()):
            return [lacks]
        return ["the trainer is at work"] * self.running

    async def finish(self, call: Coroutine[Any, Any, R]) -> R:
        """What the call returns. Cancelling this leaves the call running; `wait` is its end then."""
        self._call = asyncio.ensure_future(call)
        with stray_cancellation_fails("a call of the trainer"):
            return await asyncio.shield(self._call)

    async def wait(self) -> None:
        """On the way out: returns once nothing runs. An error of what ran is logged. A trainer that has died is not
        waited for, which may take as long as there is no host for it: what it was at is in the journal."""
        if isinstance(self._trainer, Recovers):
            self._trainer.give_up()
        if self._call is None:
            return
        await asyncio.wait([self._call])
        if not self._call.cancelled() and (error := self._call.exception()) is not None:
            logger.warning("what the trainer was at work on failed: %r", error)
