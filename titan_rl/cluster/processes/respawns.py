"""How many processes of each kind may die and be replaced before a run ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RespawnLimit:
    """The setting that limits one kind, and its value: `RespawnLimit("generation.max_respawns", 3)`."""

    setting: str
    value: int


class Respawns:
    """Counts each kind for itself. What is of no kind named here is never replaced.

    Example: one generator may be replaced:

        respawns = Respawns({"generator-": RespawnLimit("generation.max_respawns", 1)})
        respawns.take("generator-1")    # (True, " (1 of generation.max_respawns = 1)")
        respawns.take("generator-0")    # (False, ", and is not replaced: ...")
        respawns.take("trainer")        # (False, "")

    Args:
        limits: prefix of the processes' names -> how many may be replaced.
    """

    def __init__(self, limits: Mapping[str, RespawnLimit]) -> None:
        self._limits = dict(limits)
        self._replaced: Counter[str] = Counter()  # by prefix

    def take(self, name: str) -> tuple[bool, str]:
        """Whether this one may be replaced, which counts, and how many that makes, for the message of its death."""
        kind = next((prefix for prefix in self._limits if name.startswith(prefix)), None)
        if kind is None:
            return False, ""
        limit, before = self._limits[kind], self._replaced[kind]
        said = f"{limit.setting} = {limit.value}"
        if before >= limit.value:
            were = "1 was" if before == 1 else f"{before} were"
            return False, f", and is not replaced: {said}, and {were} replaced before; find out why, or raise it"
        self._replaced[kind] += 1
        return True, f" ({before + 1} of {said})"
