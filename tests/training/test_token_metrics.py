"""Metrics of a step's tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from titan_rl.training.objective import TokenStats, token_metrics

RECORD = TokenStats(
    valid_N=torch.tensor([True, True, True, False]),
    loss_M=torch.zeros(3),
    log_ratio_M=torch.tensor([0.0, -0.25, 0.5]),
    clipped_M=torch.tensor([False, False, True]),
    weight_M=torch.tensor([1.0, 0.0, 2.0]),
    masked_M=torch.tensor([False, True, False]),
    kl_M=torch.tensor([0.0, 0.3, 0.6]),
    taught_M=torch.tensor([0.5, float("nan"), 1.5]),
    entropy_M=torch.tensor([1.0, 2.0, 3.0]),
    version_M=torch.tensor([5, 5, 3]),
    oldest_version_M=torch.tensor([5, 5, 3]),
    denominator=torch.tensor([3.0]),
)


def test_token_metrics_of_a_step() -> None:
    metrics = token_metrics(RECORD, version=5)
    assert metrics["on_policy_logprob_diff_max"] == 0.25
    assert metrics["on_policy_logprob_diff_mean"] == 0.125
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (pytest.approx(2 / 3), 2)
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["entropy"] == 2
    assert metrics["num_nonfinite_tokens"] == 1
    assert metrics["correction_weight_mean"] == 1.0
    assert metrics["correction_weight_max"] == 2.0
    assert metrics["correction_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["reference_kl"] == pytest.approx(0.3)
    ratios = np.exp([0.0, -0.25, 0.5])
    assert metrics["ratio_max"] == pytest.approx(ratios.max())
    assert metrics["approx_kl"] == pytest.approx(np.mean(ratios - 1 - np.log(ratios)))
    assert "on_policy_logprob_diff_max" not in token_metrics(RECORD, version=6)


def test_tokens_with_stale_keys_are_excluded_from_logprob_diff() -> None:
    record = replace(RECORD, oldest_version_M=torch.tensor([4, 4, 4]))
    assert "on_policy_logprob_diff_max" not in token_metrics(record, version=5)


def test_concatenates_micro_batch_stats() -> None:
    whole = TokenStats.concatenate([RECORD, RECORD])
    assert float(whole.denominator.sum()) == 6
    assert token_metrics(whole, version=5)["num_nonfinite_tokens"] == 2


def test_teacher_kl_is_averaged_over_scored_tokens() -> None:
    assert token_metrics(RECORD, version=5)["teacher_kl"] == pytest.approx(1.0)
    unscored = replace(RECORD, taught_M=torch.full((3,), float("nan")))
    assert "teacher_kl" not in token_metrics(unscored, version=5)
