"""How many processes of each kind may die and be replaced before a run ends."""

from __future__ import annotations

from collections.abc import Mapping


class Respawns:
    """Counts each kind for itself. What is of no kind named here is never replaced.

    Example: two generators may be replaced, and no rollout worker:

        respawns = Respawns({"generator-": 2, "rollout-worker-": 0})
        respawns.take("generator-1")         # True, and once more
        respawns.take("rollout-worker-0")    # False
        respawns.take("trainer")             # False

    Args:
        limits: prefix of the processes' names -> how many may be replaced.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._left = dict(limits)

    def take(self, name: str) -> bool:
        """Whether this one may be replaced, which counts."""
        kind = next((prefix for prefix in self._left if name.startswith(prefix)), None)
        if kind is None or not self._left[kind]:
            return False
        self._left[kind] -= 1
        return True
