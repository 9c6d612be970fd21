"""Action probabilities of a policy, computed from sampled answers and their logprobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from titan_rl import Rollout


def bet_probability(rollouts: Sequence[Rollout], action_of: Callable[[object], str]) -> float:
    """Probability that the policy's first answer to a prompt is a bet.

    Each sampled answer counts with its exact probability, from its logprobs, however often it was sampled. If both
    actions were sampled, their probabilities are normalized. If only one was, the remaining probability goes to the
    other action.

    Args:
        rollouts: Rollouts that begin with the same prompt.

    Raises:
        ValueError: The answers were not sampled at temperature 1.
    """
    chances: dict[tuple[int, ...], float] = {}
    actions: dict[tuple[int, ...], str] = {}
    for rollout in rollouts:
        turn = rollout.turns[0]
        if turn.sampling is not None and turn.sampling.temperature != 1:
            raise ValueError(f"answers were sampled at temperature {turn.sampling.temperature:g}; it must be 1")
        said = tuple(turn.completion.token_ids)
        chances[said] = math.exp(sum(turn.completion.logprobs))
        answers = [message for message in rollout.messages if message["role"] == "assistant"]
        actions[said] = action_of(answers[len(answers) - len(rollout.turns)]["content"])
    heard = {"bet": 0.0, "pass": 0.0}
    for said, chance in chances.items():
        heard[actions[said]] += chance
    if heard["bet"] and heard["pass"]:
        return heard["bet"] / (heard["bet"] + heard["pass"])
    return min(1.0, heard["bet"]) if heard["bet"] else max(0.0, 1 - heard["pass"])
