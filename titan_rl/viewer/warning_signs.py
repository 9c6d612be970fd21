"""Warning signs in the metrics of a run's steps, which the run prints while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.scheduling.filters import EQUAL_REWARDS_ADVICE
from titan_rl.viewer.changes import HELD_OUT, Change, Peak, RewardRange, least_change
from titan_rl.viewer.metric_columns import MetricColumns
from titan_rl.viewer.verdicts import EARNED, LEAGUE, LOST_REWARD_ADVICE, fall_text

IN_A_ROW = 3
"""Number of consecutive steps with a sign before it is reported."""


@dataclass(frozen=True, slots=True)
class Sign:
    """Warning sign in the metrics of a run.

    Args:
        metric: Name of a metric that is a share, in [0, 1].
        least: Value from which on it is a sign.
        text: Meaning of the sign and advice, for a person.
    """

    metric: str
    least: float
    text: str


SIGNS = (
    Sign(
        "rollout/zero_variance_groups",
        1.0,
        f"all rollouts of every group earned the same reward, so nothing is being learned. Try: {EQUAL_REWARDS_ADVICE}",
    ),
    Sign(
        "rollout/status/truncated_length",
        0.9,
        "nearly all rollouts are cut off at sampling.max_tokens. Try: a larger one; a prompt that asks for less, or "
        "titan-rl sft on demonstrations that are short and end",
    ),
    Sign(
        "rollout/status/truncated_prompt",
        0.9,
        "nearly all rollouts end because their prompts fill model.max_context. Try: a larger one, fewer turns "
        "(rollout.max_turns), or shorter prompts",
    ),
    Sign(
        "rollout/status/error_parse",
        0.9,
        "nearly no answer can be parsed (error_parse). Try: the model.renderer that is made for this model; titan-rl "
        "sft on demonstrations, for the form of calls of tools",
    ),
    Sign(
        "sync/unverified_share",
        0.001,
        "some of the generators' weights are not verified: they cannot be read back from the engine, and the probes "
        "cannot distinguish a version from the previous one. Try: held_weights() in an engine of your own; more "
        "statedict.num_probes",
    ),
)


class WarningSigns:
    """Detector of warning signs in the steps of a run. Each is reported once, after `IN_A_ROW` steps in a row. A fall
    from the best reward is reported once for each best; a fall of held-out reward, at once."""

    def __init__(self) -> None:
        self._seen = dict.fromkeys(SIGNS, 0)  # number of consecutive steps with the sign
        self._rewards = RewardRange()
        self._falls = {name: _Falls(name) for name in (HELD_OUT, *EARNED)}

    def look(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return the warnings to print after a step with these metrics.

        Args:
            metrics: One line of `metrics.jsonl`. Lines without a sign's metric do not count for that sign.
        """
        record = MetricColumns()
        record.add({"step": 0, **{name: value for name, value in metrics.items() if name.startswith(_RECORDED)}})
        for name in record:
            self._rewards.add(name, record.values(name))
        earned = next((name for name in EARNED if name in record), EARNED[0])
        is_solved = any(map(self._rewards.is_highest, record.values(earned)))
        warnings: list[str] = []
        for sign in SIGNS:
            share = metrics.get(sign.metric)
            if not isinstance(share, int | float) or self._seen[sign] >= IN_A_ROW:
                continue
            counts = share >= sign.least and not (is_solved and sign.metric == "rollout/zero_variance_groups")
            self._seen[sign] = self._seen[sign] + 1 if counts else 0
            if self._seen[sign] == IN_A_ROW:
                warnings.append(f"for {IN_A_ROW} steps {sign.text}")
        if LEAGUE not in metrics:  # there the opponents become stronger
            found = (self._falls[name].look(record) for name in (earned, HELD_OUT))
            warnings += [
                f"the reward falls: {fall_text(change)}. Try {LOST_REWARD_ADVICE}"
                for change in found
                if change is not None
            ]
        return warnings


_RECORDED = ("step", "validation/", "rollout/reward_", "rollout/finished_reward_mean")


class _Falls:
    """Falls of one reward from its best."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._peak = Peak(metric, is_held_out=metric == HELD_OUT)
        self._in_a_row = 1 if metric == HELD_OUT else IN_A_ROW
        self._least = 0.0  # smallest change that counts
        self._count = 0  # consecutive steps below the best
        self._reported: float | None = None  # step of the best of the last fall that was reported

    def look(self, record: MetricColumns) -> Change | None:
        """Add a step, and return the fall that has to be reported, if there is one."""
        if self._metric not in record:
            return None
        self._least = max(self._least, least_change(record, self._metric))
        self._peak.look(record)
        change = self._peak.fall(self._least)
        self._count = 0 if change is None else self._count + 1
        if change is None or self._count < self._in_a_row or change.first_step == self._reported:
            return None
        self._reported = change.first_step
        return change
