"""The loss against a float64 NumPy reference that shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.training.losses import grpo_loss, selected_logprobs
from titan_rl.training.metrics import TokenRecord, token_metrics

LOW, HIGH = 0.2, 0.28


def reference(logprobs: np.ndarray, behaviour: np.ndarray, advantages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss and its derivative by the logprob, token by token."""
    losses, slopes = np.zeros(len(logprobs)), np.zeros(len(logprobs))
    for i, (p, b, a) in enumerate(zip(logprobs, behaviour, advantages, strict=True)):
        if not np.isfinite(p - b):
            continue
        ratio = np.exp(np.clip(p - b, -20, 20))
        inside = abs(p - b) <= 20
        if a > 0 and ratio > 1 + HIGH:
            losses[i] = -a * (1 + HIGH)
        elif a < 0 and ratio < 1 - LOW:
            losses[i] = -a * (1 - LOW)
        else:
            losses[i] = -a * ratio
            slopes[i] = -a * ratio if inside else 0.0
    return losses, slopes


def check(logprobs: list[float], behaviour: list[float], advantages: list[float]) -> None:
    p = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    b, a = torch.tensor(behaviour, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)
    result = grpo_loss(p, b, a, clip_low=LOW, clip_high=HIGH)
    result.loss_N.sum().backward()
    losses, slopes = reference(np.array(logprobs), np.array(behaviour), np.array(advantages))
    np.testing.assert_allclose(result.loss_N.detach().numpy(), losses, rtol=1e-12)
    assert p.grad is not None
    np.testing.assert_allclose(p.grad.numpy(), slopes, rtol=1e-12)
    np.testing.assert_array_equal(result.valid_N.numpy(), np.isfinite(np.array(logprobs) - np.array(behaviour)))


logprob = st.floats(-100, 0)
behaviour_logprob = st.one_of(logprob, st.just(float("nan")), st.just(float("-inf")))


@given(st.lists(st.tuples(logprob, behaviour_logprob, st.floats(-5, 5)), max_size=20))
def test_random_tokens(tokens: list[tuple[float, float, float]]):
    p, b, a = ([token[i] for token in tokens] for i in range(3))
    check(p, b, a)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-90.0, -0.5, -0.1, 0.0, 0.1, 0.5, 90.0])
def test_each_side_of_each_bound(advantage: float, log_ratio: float):
    check([-100.0 + log_ratio], [-100.0], [advantage])


def test_no_tokens():
    check([], [], [])


def test_a_nonfinite_behaviour_logprob_leaves_the_others_alone():
    whole = grpo_loss(torch.tensor([-1.0]), torch.tensor([-1.1]), torch.tensor([1.0]), clip_low=LOW, clip_high=HIGH)
    p = torch.tensor([-1.0, -2.0], requires_grad=True)
    b = torch.tensor([-1.1, float("nan")])
    result = grpo_loss(p, b, torch.tensor([1.0, 1.0]), clip_low=LOW, clip_high=HIGH)
    assert result.valid_N.tolist() == [True, False]
    assert result.loss_N.sum() == whole.loss_N.sum()
    result.loss_N.sum().backward()
    assert p.grad is not None
    assert p.grad[1] == 0


@settings(max_examples=25)
@given(st.integers(0, 5), st.floats(0.1, 3.0), st.integers(0, 1000))
def test_selected_logprobs_and_their_gradient(num_tokens: int, temperature: float, seed: int):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_tokens, 7)) * 10
    targets, upstream = rng.integers(0, 7, num_tokens), rng.normal(size=num_tokens)
    scaled = logits / temperature
    log_softmax = scaled - np.log(np.exp(scaled - scaled.max(-1, keepdims=True, initial=-99)).sum(-1, keepdims=True))
    log_softmax -= scaled.max(-1, keepdims=True, initial=-99)
    one_hot = np.eye(7)[targets]

    x = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    temperatures = torch.full((num_tokens,), temperature)
    logprobs, entropies = selected_logprobs(x, torch.tensor(targets), temperatures)
    (logprobs * torch.tensor(upstream, dtype=torch.float32)).sum().backward()

    np.testing.assert_allclose(logprobs.detach().numpy(), (log_softmax * one_hot).sum(-1), rtol=1e-4, atol=1e-4)
    probs = np.exp(log_softmax)
    np.testing.assert_allclose(entropies.numpy(), -(probs * log_softmax).sum(-1), rtol=1e-4, atol=1e-4)
    assert x.grad is not None
    expected = (one_hot - probs) * upstream[:, None] / temperature
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-3, atol=1e-4)
    assert not entropies.requires_grad


def test_metrics_compare_on_policy_tokens_and_measure_staleness():
    record = TokenRecord(
        loss_N=torch.zeros(4),
        valid_N=torch.tensor([True, True, True, False]),
        log_ratio_N=torch.tensor([0.0, -0.25, 0.5, 0.0]),
        clipped_N=torch.tensor([False, False, True, False]),
        entropy_N=torch.tensor([1.0, 2.0, 3.0, 99.0]),
        version_N=torch.tensor([5, 5, 3, 0]),
        oldest_version_N=torch.tensor([5, 5, 3, 0]),
    )
    metrics = token_metrics(record, version=5)
    assert metrics["on_policy_logprob_diff_max"] == 0.25
    assert metrics["on_policy_logprob_diff_mean"] == 0.125
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (pytest.approx(2 / 3), 2)
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["entropy"] == 2
    assert metrics["num_nonfinite_tokens"] == 1
    ratios = np.exp([0.0, -0.25, 0.5])
    assert metrics["ratio_max"] == pytest.approx(ratios.max())
    assert metrics["approx_kl"] == pytest.approx(np.mean(ratios - 1 - np.log(ratios)))
    assert "on_policy_logprob_diff_max" not in token_metrics(record, version=6)


def test_tokens_sampled_over_keys_of_older_weights_are_not_compared():
    record = TokenRecord(
        loss_N=torch.zeros(2),
        valid_N=torch.tensor([True, True]),
        log_ratio_N=torch.tensor([0.5, 0.5]),
        clipped_N=torch.tensor([False, False]),
        entropy_N=torch.zeros(2),
        version_N=torch.tensor([4, 5]),
        oldest_version_N=torch.tensor([4, 4]),
    )
    assert "on_policy_logprob_diff_max" not in token_metrics(record, version=5)
