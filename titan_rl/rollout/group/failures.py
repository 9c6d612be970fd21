"""Errors of rollouts, counted by kind, so that a message names the one that matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from titan_rl.rollout.types import Rollout, RolloutGroup

_FIRST, _LAST = 100, 500  # characters of an error's text in a message; what went wrong often stands at its end


def error_kind(rollout: Rollout) -> str:
    """Equal for errors of one type from one line of code, whatever their texts."""
    return f"{rollout.status}: {rollout.failure.kind}" if rollout.failure is not None else str(rollout.status)


def error_text(rollout: Rollout) -> str:
    """The status, and what is known of the error: `error_env: KeyError: 'answer' (env.py:17 in step)`."""
    text = _whole(rollout)
    shown = text if len(text) <= _FIRST + _LAST else f"{text[:_FIRST]} ... {text[-_LAST:]}"
    return f"{rollout.status}: {shown}"


def error_in_full(rollout: Rollout) -> str:
    """As `error_text`, of any length, and with the traceback."""
    trace = f"\n{rollout.failure.traceback}" if rollout.failure is not None else ""
    return f"{rollout.status}: {_whole(rollout)}{trace}"


def _whole(rollout: Rollout) -> str:
    return str(rollout.error) if rollout.failure is None else str(rollout.failure)


def _in_a_line(text: str) -> str:
    """The first line and the last."""
    lines = text.splitlines()
    return text if len(lines) < 2 else f"{lines[0]} ... {lines[-1]}"


class ErrorCounts:
    """How many rollouts each kind of error has hit.

    Example:

        counts = ErrorCounts(group.rollouts)
        counts.describe()   # "30 of 32 rollouts were lost to errors, 29 of them to error_env: KeyError: 'a' (e.py:7)"
    """

    def __init__(self, rollouts: Iterable[Rollout] = ()) -> None:
        self.num_rollouts = 0
        self._counts: Counter[str] = Counter()
        self._texts: dict[str, str] = {}  # of the first of each kind
        self.add(rollouts)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            self.num_rollouts += 1
            if rollout.status.is_fault:
                kind = error_kind(rollout)
                self._counts[kind] += 1
                self._texts.setdefault(kind, _in_a_line(error_text(rollout)))

    def add_group(self, group: RolloutGroup) -> None:
        """All rollouts of a group. A reward that failed has hit each of them."""
        if group.failure is None:
            self.add(group.rollouts)
        else:
            self.num_rollouts += len(group.rollouts)
            self._counts[group.failure.kind] += len(group.rollouts)
            self._texts.setdefault(group.failure.kind, str(group.failure))

    @property
    def num_errors(self) -> int:
        return self._counts.total()

    def most_common(self) -> list[tuple[str, int]]:
        """The text of each kind's first, in a line, and how many rollouts it hit, the most frequent first."""
        return [(self._texts[kind], count) for kind, count in self._counts.most_common()]

    def describe(self) -> str:
        """How many there are, and the most frequent. Empty where there is none."""
        if not self._counts:
            return ""
        text, count = self.most_common()[0]
        hit = "all of them" if count == self.num_errors else f"{count} of them"
        return f"{self.num_errors} of {self.num_rollouts} rollouts were lost to errors, {hit} to {text}"
