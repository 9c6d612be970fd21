"""Tells when a run cannot go on since too few generators serve, or a trainer waits, and when it does again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

AFTER_S = 2.0
LOOK_S = 0.5


class Shortage:
    """What stands in the way of every request is told once it has lasted for some seconds: a generator that is replaced
    at once is told of by whoever replaces it.

    Args:
        trouble: says why no request can be answered; None where they can.
        tell: shows a person a line.
        note: keeps, for whoever looks at the run, what it waits for; "" where it does not.
        trainer: says what a trainer that is to start again waits for, which it tells itself; "" where it does not.
    """

    def __init__(
        self,
        trouble: Callable[[], str | None],
        tell: Callable[[str], object],
        note: Callable[[str], object],
        trainer: Callable[[], str] = str,
    ) -> None:
        self._trainer = trainer
        self._trouble = trouble
        self._tell = tell
        self._note = note

    async def watch(self) -> None:
        """Until it is cancelled."""
        clock = asyncio.get_running_loop().time
        since, told, noted = clock(), "", ""
        while True:
            await asyncio.sleep(LOOK_S)
            trouble = self._trouble() or ""
            if not trouble:
                if told:
                    self._tell(f"enough generators serve again, after {clock() - since:.0f} s")
                since, told = clock(), ""
            elif trouble != told and clock() - since >= AFTER_S:
                told = trouble
                self._tell(f"the run waits for generators: {trouble}")
            lacks = {"generators": told, "trainer": self._trainer()}
            if (now := "; ".join(f"{who}: {what}" for who, what in lacks.items() if what)) != noted:
                noted = now
                self._note(noted)
