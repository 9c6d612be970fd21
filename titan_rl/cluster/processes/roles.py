"""Roles of processes in a run, and the limit on how many of each role may be replaced."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses before the replacement of a process that never started, each twice as long as the one before, in seconds."""


class Role(StrEnum):
    """Purpose of a process in a run. The name of the process begins with the value."""

    TRAINER = "trainer"
    GENERATOR = "generator"
    ROLLOUT_WORKER = "rollout-worker"
    HOST_AGENT = "agent"

    @staticmethod
    def of(name: str) -> Role | None:
        """Role of the process with this name; None if the name has none."""
        return next((role for role in Role if name == role or name.startswith(f"{role}-")), None)


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """A process of a run by its role and number. A process and its replacements have the same id.

    Example: `str(ProcessId(Role.GENERATOR, 3))` is "generator-3". The trainer, of which there is one, is "trainer".
    """

    role: Role
    index: int = 0

    def __str__(self) -> str:
        return str(self.role) if self.role is Role.TRAINER else f"{self.role}-{self.index}"


class Respawns:
    """Counter of replaced processes per role. Each role may be replaced `hosts.max_respawns` times.

    Example: one process of each role may be replaced:

        respawns = Respawns(1)
        respawns.take(Role.GENERATOR)    # (True, " (1 of hosts.max_respawns = 1)")
        respawns.take(Role.GENERATOR)    # (False, ", and is not replaced: ...")
    """

    def __init__(self, max_respawns: int) -> None:
        self._max_respawns = max_respawns
        self._replaced: Counter[Role] = Counter()

    def take(self, role: Role) -> tuple[bool, str]:
        """Count a replacement if one is left. Returns whether it is allowed, and its count for the failure message."""
        before, setting = self._replaced[role], f"hosts.max_respawns = {self._max_respawns}"
        if before >= self._max_respawns:
            were = "1 was" if before == 1 else f"{before} were"
            return False, f", and is not replaced: {setting}, and {were} replaced before; find out why, or raise it"
        self._replaced[role] += 1
        return True, f" ({before + 1} of {setting})"

    def reset(self, role: Role) -> None:
        """Allow all replacements of a role again."""
        del self._replaced[role]
