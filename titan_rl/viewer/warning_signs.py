"""Warning signs in the metrics of a run's steps, which the run prints while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_rl.viewer.changes import HELD_OUT, Peak, RewardRange
from titan_rl.viewer.metric_columns import MetricColumns
from titan_rl.viewer.signs import SIGNS
from titan_rl.viewer.verdicts import EARNED, LEAGUE, LOST_REWARD_ADVICE, fall_text

IN_A_ROW = 3
"""Number of consecutive steps with a sign before it is reported."""


_RECORDED = ("step", "validation/", "rollout/reward_", "rollout/finished_reward_mean")


class WarningSigns:
    """Detector of warning signs in the steps of a run. Each is reported once, after `IN_A_ROW` steps in a row. A fall
    from the best reward is reported once for each best; a fall of held-out reward, at once."""

    def __init__(self) -> None:
        self._seen = {sign: 0 for sign in SIGNS if sign.warning}  # number of consecutive steps with the sign
        self._rewards = RewardRange()
        self._peaks = {name: Peak(name) for name in (HELD_OUT, *EARNED)}
        self._below = dict.fromkeys(self._peaks, 0)  # number of consecutive steps below the best one
        self._reported: set[tuple[str, float]] = set()  # falls, by the metric and the best step

    def look(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return the warnings to print after a step with these metrics.

        Args:
            metrics: One line of `metrics.jsonl`. Lines without a sign's metric do not count for that sign.
        """
        record = MetricColumns()
        record.add({"step": 0, **{name: value for name, value in metrics.items() if name.startswith(_RECORDED)}})
        self._rewards.look(record)
        earned = next((name for name in EARNED if name in record), EARNED[0])
        is_solved = any(map(self._rewards.is_highest, record.values(earned)))
        warnings: list[str] = []
        for sign in self._seen:
            share = metrics.get(sign.metric)
            if not isinstance(share, int | float) or self._seen[sign] >= IN_A_ROW:
                continue
            counts = share >= sign.least and not (is_solved and sign.of_learning)
            self._seen[sign] = self._seen[sign] + 1 if counts else 0
            if self._seen[sign] == IN_A_ROW:
                warnings.append(f"for {IN_A_ROW} steps {sign.warning}")
        for name in (earned, HELD_OUT) if LEAGUE not in metrics else ():  # in a league opponents become stronger
            self._peaks[name].look(record)
            change = self._peaks[name].fall
            self._below[name] = 0 if change is None else self._below[name] + (name in record)
            if change is not None and self._below[name] >= (1 if name == HELD_OUT else IN_A_ROW):
                if (name, change.first_step) not in self._reported:
                    warnings.append(f"the reward falls: {fall_text(change)}. Try {LOST_REWARD_ADVICE}")
                self._reported.add((name, change.first_step))
        return warnings
