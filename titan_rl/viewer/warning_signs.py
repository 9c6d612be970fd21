"""What the metrics of a run's steps say of why it learns nothing: nothing fails then, and nothing else would tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.scheduling.filters import EQUAL_REWARDS_ADVICE

IN_A_ROW = 3
"""Steps that show a sign before it is told."""


@dataclass(frozen=True, slots=True)
class Sign:
    """
    Args:
        metric: a share, in [0, 1].
        least: of it that is a sign.
        text: for a person: what it means, and what to try.
    """

    metric: str
    least: float
    text: str


SIGNS = (
    Sign(
        "rollout/zero_variance_groups",
        1.0,
        f"in no group do rewards differ, so that nothing is learned. Try: {EQUAL_REWARDS_ADVICE}",
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
        "nothing has shown that the generators hold the trainer's weights: the engine cannot be read back, and the "
        "probes cannot tell a version from the one before. Try: held_weights() in an engine of your own; more "
        "statedict.num_probes",
    ),
)


class WarningSigns:
    """Watches the steps of a run. Each sign is told once, when `IN_A_ROW` steps in a row have shown it."""

    def __init__(self) -> None:
        self._seen = dict.fromkeys(SIGNS, 0)  # in how many of the last steps

    def look(self, metrics: Mapping[str, Any]) -> list[str]:
        """What is to be told after a step with these metrics.

        Args:
            metrics: as in a line of `metrics.jsonl`; what lacks a sign's metric is no step for it.
        """
        told: list[str] = []
        for sign in SIGNS:
            share = metrics.get(sign.metric)
            if not isinstance(share, int | float) or self._seen[sign] >= IN_A_ROW:
                continue
            self._seen[sign] = self._seen[sign] + 1 if share >= sign.least else 0
            if self._seen[sign] == IN_A_ROW:
                told.append(f"for {IN_A_ROW} steps {sign.text}")
        return told
