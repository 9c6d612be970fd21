"""Whether a process that may be busy for long hangs. Only arithmetic: who asks says what time it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signs:
    """Health of one process: for how long it has given no sign of life, in seconds.

    Args:
        silent_s: it has neither answered nor computed.
        still_s: its work has not got on, nor has it computed; None where it is at nothing.
        stopped_s: it has been stopped by a signal, as SIGSTOP.
    """

    silent_s: float = 0.0
    still_s: float | None = None
    stopped_s: float = 0.0


STOPPED_LIMIT_S = 3.0
"""Longest that a process may be stopped by a signal. What is busy, or waits, is never in that state, so that the limit
is much shorter than that of silence."""


class VitalSigns:
    """Adds up for how long a process gives no sign of life.

    An answer is one, and so is computing: a native call that holds Python's lock (loading a model, compiling,
    capturing graphs) lets no thread answer, and is no hang. A stopped or deadlocked process does neither. What it is
    at gets on where it says so, or where it computes: a thread that answers tells nothing of a collective that is
    stuck.

    Time counts by looks, each of them for `longest_look_s` at most: when the looker itself was stopped or starved, so
    may have been what it looks at.

    Example, with looks a second apart:

        signs = VitalSigns(longest_look_s=2.0)
        signs.look(1.0, computed=False)  # Signs(silent_s=1.0, still_s=None, stopped_s=0.0)
        signs.answered(moves=7, at_work=True)
        signs.look(2.0, computed=False)  # Signs(silent_s=0.0, still_s=0.0, stopped_s=0.0)
    """

    def __init__(self, longest_look_s: float, now: float = 0.0) -> None:
        self._longest_look_s = longest_look_s
        self._looked_at = now
        self._heard = False  # since the last look
        self._moved = False
        self._moves: int | None = None
        self._at_work = False
        self._silent_s = self._still_s = self._stopped_s = 0.0

    def answered(self, moves: int, *, at_work: bool) -> None:
        """It says how often it has got on so far, and whether it is at something."""
        self._heard = True
        self._moved = self._moved or moves != self._moves
        self._moves, self._at_work = moves, at_work

    def look(self, now: float, *, computed: bool, stopped: bool = False) -> Signs:
        """The health of the process now.

        Args:
            computed: it, or a process of its own, has used a processor or a disk since the last look.
            stopped: the kernel says that a signal has stopped it.
        """
        passed = min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
        self._silent_s = 0.0 if self._heard or computed else self._silent_s + passed
        self._still_s = 0.0 if self._moved or computed or not self._at_work else self._still_s + passed
        self._stopped_s = self._stopped_s + passed if stopped else 0.0
        self._heard = self._moved = False
        return Signs(self._silent_s, self._still_s if self._at_work else None, self._stopped_s)

    @property
    def is_quiet(self) -> bool:
        """Whether it has given no sign since the last look, so that it matters what it computes."""
        return not self._heard or (self._at_work and not self._moved)


def hang(signs: Iterable[Signs], limit_s: float) -> str | None:
    """Why processes that are of no use without each other hang; None where they do not.

    One of them that is stopped, or gives no sign of life, is enough. One that does not get on may wait for another that
    does, so all that are at something have to stand still.
    """
    each = list(signs)
    if any(one.stopped_s >= STOPPED_LIMIT_S for one in each):
        return f"it has been stopped by a signal for {STOPPED_LIMIT_S:g} s"
    if any(one.silent_s >= limit_s for one in each):
        return f"it hangs: it has neither answered nor computed for {limit_s:g} s"
    at_work = [one.still_s for one in each if one.still_s is not None]
    if at_work and min(at_work) >= limit_s:
        return f"it hangs: what it is at has not got on for {limit_s:g} s"
    return None
