"""What a harness says that an episode and its turns are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping

from titan_rl.core.errors import RequestError

Answer = tuple[str, int]
"""What a client knows a completion by: the id of the answer, and which of its choices."""


class EpisodeRewards:
    """Rewards by name, of the whole and of each turn. The last report of a name is the one that counts."""

    def __init__(self) -> None:
        self._whole: dict[str, float] = {}
        self._by_answer: dict[Answer, dict[str, float]] = {}  # in the order of the turns

    def add_turn(self, answer: Answer) -> None:
        """
        Raises:
            RequestError: there is a turn of this answer.
        """
        if answer in self._by_answer:
            raise RequestError(f"answer {answer[0]!r} has a choice {answer[1]}; each has an id of its own")
        self._by_answer[answer] = {}

    def report(self, rewards: Mapping[str, float], answer_id: str | None, index: int) -> None:
        """
        Args:
            answer_id: None for the whole.

        Raises:
            LookupError: there is no such answer.
            ValueError: a reward is no finite number.
        """
        for name, value in rewards.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"reward {name!r} is {value!r}; it must be a finite number")
        if answer_id is not None and (answer_id, index) not in self._by_answer:
            raise LookupError(f"the episode has no choice {index} of an answer {answer_id!r}")
        of = self._whole if answer_id is None else self._by_answer[answer_id, index]
        of.update({str(name): float(value) for name, value in rewards.items()})

    def by_turn(self) -> list[dict[str, float]]:
        """Those of each turn; the last turn's with those of the whole, which are added up."""
        turns = [dict(rewards) for rewards in self._by_answer.values()]
        for name, value in self._whole.items() if turns else ():
            turns[-1][name] = turns[-1].get(name, 0.0) + value
        return turns
