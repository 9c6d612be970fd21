"""Generalized advantage estimation, compared with the mixture of n-step returns that it is defined by, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.training.gae import estimate, gae

NUMBERS = st.floats(-10, 10, allow_nan=False)
SHARES = st.floats(0, 1)


def mixture_of_returns(
    rewards: list[float], values: list[float], last_value: float, gamma: float, lam: float
) -> list[float]:
    """A_k = sum_n w_n * (G_k^n - V_k): the n-step returns G_k^n = r_k + ... + gamma^n * V_{k+n} with the weights
    (1 - lam) * lam^(n-1), and the remaining weight on the longest (arXiv:1506.02438, eq. 11 to 16)."""
    states = [*values, last_value]
    advantages: list[float] = []
    for k in range(len(rewards)):
        horizon, total = len(rewards) - k, 0.0
        for n in range(1, horizon + 1):
            n_step = sum(gamma**i * rewards[k + i] for i in range(n)) + gamma**n * states[k + n]
            weight = lam ** (n - 1) * (1 - lam if n < horizon else 1)
            total += weight * (n_step - values[k])
        advantages.append(total)
    return advantages


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=12), NUMBERS, SHARES, SHARES)
def test_gae_equals_the_mixture_of_n_step_returns(
    steps: list[tuple[float, float]], last_value: float, gamma: float, lam: float
):
    rewards, values = [list(each) for each in zip(*steps, strict=True)] or [[], []]
    found = gae(rewards, values, last_value, gamma=gamma, lam=lam)

    assert found == pytest.approx(mixture_of_returns(rewards, values, last_value, gamma, lam), rel=1e-9, abs=1e-9)


@given(st.data(), SHARES, SHARES, st.sampled_from(["token", "turn"]))
def test_estimates_are_per_sequence_over_tokens_or_turns(data: st.DataObject, gamma: float, lam: float, over: str):
    draw = data.draw
    lengths = draw(st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=4))
    sequences_N = np.array([s for s, turns in enumerate(lengths) for size in turns for _ in range(size)], np.int64)
    turns_N = np.array([t for turns in lengths for t, size in enumerate(turns) for _ in range(size)], np.int64)
    size = len(sequences_N)
    rewards_N, values_N = (np.array(draw(st.lists(NUMBERS, min_size=size, max_size=size))) for _ in range(2))
    last_S = np.array(draw(st.lists(NUMBERS, min_size=len(lengths), max_size=len(lengths))))

    found = estimate(rewards_N, values_N, last_S, sequences_N, turns_N, gamma=gamma, lam=lam, over=over)  # pyright: ignore[reportArgumentType]

    place = 0
    for last, turns in zip(last_S, lengths, strict=True):
        actions = turns if over == "turn" else [1] * sum(turns)
        starts = [place + sum(actions[:k]) for k in range(len(actions))]
        rewards = [float(rewards_N[start : start + count].sum()) for start, count in zip(starts, actions, strict=True)]
        values = [float(values_N[start]) for start in starts]
        expected = mixture_of_returns(rewards, values, float(last), gamma, lam)
        for start, count, advantage, value in zip(starts, actions, expected, values, strict=True):
            for token in range(start, start + count):
                assert found.advantages_N[token] == pytest.approx(advantage, rel=1e-9, abs=1e-9)
                assert found.targets_N[token] == pytest.approx(advantage + value, rel=1e-9, abs=1e-9)
                assert found.acts_N[token] == (token == start)
        place += sum(turns)


def test_undiscounted_final_reward_is_the_return_of_every_action():
    assert gae([0, 0, 1], [0.5, 0.25, 0.75], 0.0, gamma=1, lam=1) == [0.5, 0.75, 0.25]


def test_truncated_episode_bootstraps_from_the_last_value():
    ended = gae([0, 0], [0.5, 0.5], 0.0, gamma=1, lam=0.95)
    truncated = gae([0, 0], [0.5, 0.5], 0.5, gamma=1, lam=0.95)

    assert ended == pytest.approx([-0.475, -0.5])
    assert truncated == [0.0, 0.0]
