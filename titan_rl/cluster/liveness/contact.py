"""Whether the other end of a link is there. Only arithmetic: who asks says what time it is."""

from __future__ import annotations


class Contact:
    """Adds up for how long nothing has come from the other end.

    Time counts by looks, each of them for `longest_look_s` at most: where the looker itself was stopped or starved,
    what has come meanwhile is still to be read, and nobody has been silent.

    Example: of a host that may be silent for 3 s, looked at four times a second:

        contact = Contact(limit_s=3.0, longest_look_s=0.5, now=clock())
        contact.heard()
        contact.look(clock())  # False: it is there
    """

    def __init__(self, limit_s: float, longest_look_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._longest_look_s = longest_look_s
        self._looked_at = now
        self.silent_s = 0.0
        self._longest_s = 0.0

    def heard(self) -> None:
        self.silent_s = 0.0

    def look(self, now: float) -> bool:
        """Whether it is lost."""
        self.silent_s += min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
        self._longest_s = max(self._longest_s, self.silent_s)
        return self.silent_s >= self._limit_s

    def take_longest(self) -> float:
        """The longest silence, in seconds, since this was last called, by another thread if need be."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s
