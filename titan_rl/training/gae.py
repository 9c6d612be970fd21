"""Generalized advantage estimation (GAE) over the actions of a rollout, which are its tokens or its turns.

For the actions k = 0 .. K-1 of a rollout, each with the value V_k of the state before it and the reward r_k after it:

    delta_k  = r_k + gamma * V_{k+1} - V_k
    A_k      = delta_k + gamma * lambda * A_{k+1},    A_K = 0
    target_k = A_k + V_k

V_K is 0 if the rollout has ended, and the value of the last state if it was truncated. With lambda = 1, A_k is the sum
of the discounted rewards minus the value; with lambda = 0, it is the error delta_k of one action alone.

Tokens of the prompt and of the environment are states, not actions: the state before the first token of a turn is
the whole context, with the environment's answer. So gamma and lambda apply once between the last token of a turn and
the first token of the next one. With turns as actions, gamma and lambda apply once per turn; the value of a turn is
that of the state before its first token, its reward is the sum over its tokens, and all of its tokens have its
advantage.

Sources: Schulman et al., 2016, arXiv:1506.02438, eq. 16 (GAE); Schulman et al., 2017, arXiv:1707.06347, eq. 11 and 12
(its truncated form, in PPO).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan_rl.training.choices import GAEOver


def gae(
    rewards: Sequence[float], values: Sequence[float], last_value: float, *, gamma: float, lam: float
) -> list[float]:
    """Advantages of the actions of one rollout; the module's docstring has the formula.  # [num_actions]

    Args:
        rewards: Reward after each action.
        values: Value of the state before each action.
        last_value: Value of the state after the last action; 0 if the rollout has ended.

    Example: `gae([0, 1], [0.5, 0.25], 0, gamma=1, lam=1)` is `[0.5, 0.75]`.
    """
    advantages = [0.0] * len(rewards)
    following, next_value = 0.0, last_value
    for k in reversed(range(len(rewards))):
        delta = rewards[k] + gamma * next_value - values[k]
        advantages[k] = following = delta + gamma * lam * following
        next_value = values[k]
    return advantages


@dataclass(frozen=True, slots=True)
class AdvantageEstimate:
    """Advantages and value targets of the trained tokens of a micro-batch."""

    advantages_N: NDArray[np.float64]
    targets_N: NDArray[np.float64]  # targets for the values of the states before actions
    acts_N: NDArray[np.bool_]  # whether an action begins with the token, so that the state before it has a target


def estimate(
    rewards_N: NDArray[np.float64],
    values_N: NDArray[np.float64],
    last_values_S: NDArray[np.float64],
    sequences_N: NDArray[np.int64],
    turns_N: NDArray[np.int64],
    *,
    gamma: float,
    lam: float,
    over: GAEOver,
) -> AdvantageEstimate:
    """Estimate the advantages of N trained tokens of S sequences.

    Args:
        values_N: Value of the state before each token.
        last_values_S: Value of the state after each sequence; 0 where its rollout has ended.
        sequences_N: Number of each token's sequence, ascending.
        turns_N: Number of each token's turn in its sequence, ascending.
    """
    tokens = np.arange(len(rewards_N))
    is_first_N = np.ones(len(rewards_N), bool)
    if over == "turn":
        is_first_N[1:] = (np.diff(sequences_N) != 0) | (np.diff(turns_N) != 0)
    firsts_K = tokens[is_first_N]
    rewards_K = np.add.reduceat(rewards_N, firsts_K) if len(firsts_K) else rewards_N
    values_K, sequences_K = values_N[firsts_K], sequences_N[firsts_K]
    advantages_K = np.zeros(len(firsts_K))
    for sequence in np.unique(sequences_K):
        own = slice(*np.searchsorted(sequences_K, [sequence, sequence + 1]))
        last_value = float(last_values_S[sequence])
        advantages_K[own] = gae(rewards_K[own].tolist(), values_K[own].tolist(), last_value, gamma=gamma, lam=lam)
    action_N = np.cumsum(is_first_N) - 1
    return AdvantageEstimate(advantages_K[action_N], (advantages_K + values_K)[action_N], is_first_N)
