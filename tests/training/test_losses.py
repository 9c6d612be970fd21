"""Losses, corrections and averages compared with a float64 NumPy reference that shares no code with them.

The reference loops over tokens and uses derivatives worked out by hand.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.core.errors import ConfigError
from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.losses import BY_NAME, ClipRange, LossTokens, TokenLoss, find_loss
from titan_rl.training.objective import Objective
from titan_rl.training.settings import CorrectionConfig, TrainingConfig
from titan_rl.training.tensor_batch import TensorBatch, make_tensor_batch

VERSION, CONTEXT, LIMIT = 7, 512, 20.0
NAN, INF = float("nan"), float("inf")

Row = dict[str, Any]  # one token


def reference(rows: list[Row], training: TrainingConfig, correction: CorrectionConfig) -> dict[str, Any]:
    """Loss, its derivative with respect to each logprob, and the denominator."""
    for row in rows:
        age = max(0, VERSION - row["version"])
        row["old"] = {
            "behaviour": row["behaviour"],
            "recomputed": row["start"],
            "interpolated": row["behaviour"] + age / (age + 1) * (row["policy"] - row["behaviour"]),
        }[correction.proximal]
        needed = [row["policy"], row["behaviour"], row["old"]] + ([row["reference"]] if training.kl_coef else [])
        row["valid"] = all(np.isfinite(value) for value in needed)
    slopes = np.zeros(len(rows))
    total = 0.0
    sequences: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row["valid"]:
            sequences.setdefault(row["sequence"], []).append(i)
    denominator = {
        "token": float(sum(map(len, sequences.values()))),
        "sequence": float(len(sequences)),
        "constant": float(len(sequences) * CONTEXT),
    }[training.average]
    masked: list[bool] = []
    for members in sequences.values():
        log_rho = {i: np.clip(rows[i]["old"] - rows[i]["behaviour"], -LIMIT, LIMIT) for i in members}
        product = np.exp(np.clip(sum(log_rho.values()), -LIMIT, LIMIT))
        geometric = np.exp(sum(log_rho.values()) / len(members))
        log_ratio = {i: np.clip(rows[i]["policy"] - rows[i]["old"], -LIMIT, LIMIT) for i in members}
        sequence_ratio = np.exp(sum(log_ratio.values()) / len(members))
        vetoed = correction.veto is not None and any(np.exp(rho) < correction.veto for rho in log_rho.values())
        for i in members:
            row, rho = rows[i], np.exp(log_rho[i])
            weight = {"none": 1.0, "token": rho, "sequence": product}[correction.weight]
            if correction.cap is not None:
                weight = min(weight, correction.cap)
            measured = {"none": correction.bounds[0], "token": rho, "sequence": product, "geometric": geometric}
            low, high = correction.bounds
            row["masked"] = vetoed or not low <= measured[correction.mask] <= high
            masked.append(row["masked"])
            inside = abs(row["policy"] - row["old"]) <= LIMIT
            loss, slope = policy_loss(training, row, np.exp(log_ratio[i]), sequence_ratio, inside)
            if row["masked"]:
                weight = loss = slope = 0.0
            share = 1 / len(members) if training.average == "sequence" else 1.0
            kl, kl_slope = kl_loss(training, row)
            weight *= row.get("loss_weight", 1.0)
            total += share * (weight * loss + training.kl_coef * kl)
            slopes[i] = share * (weight * slope + training.kl_coef * kl_slope)
    return {"loss": total, "slopes": slopes, "denominator": denominator, "masked": sum(masked)}


def policy_loss(
    training: TrainingConfig, row: Row, ratio: float, sequence_ratio: float, inside: bool
) -> tuple[float, float]:
    a, low, high = row["advantage"], 1 - training.clip[0], 1 + training.clip[1]
    match training.loss:
        case "reinforce":
            return -a * row["policy"], -a
        case "nll":
            return -row["policy"], -1.0
        case "cispo":
            weight = min(max(ratio, low), high)
            return -weight * a * row["policy"], -weight * a
        case "gspo":
            ratio, inside = sequence_ratio, True
    if a > 0 and ratio > high:
        return -a * high, 0.0
    if a < 0 and ratio < low:
        return -a * low, 0.0
    return -a * ratio, -a * ratio if inside else 0.0


def kl_loss(training: TrainingConfig, row: Row) -> tuple[float, float]:
    if not training.kl_coef:
        return 0.0, 0.0
    d = row["reference"] - row["policy"]
    inside, d = abs(d) <= LIMIT, np.clip(d, -LIMIT, LIMIT)
    if training.kl == "k2":
        return d * d / 2, -d if inside else 0.0
    return np.exp(d) - d - 1, 1 - np.exp(d) if inside else 0.0


def batch_of(rows: list[Row], num_sequences: int) -> TensorBatch:
    blank = make_tensor_batch(
        [[Family((TrainingSample("g", "g/0", [1, 2], [False, False], [0, 0], [0, 0], [-1, -1], 1.0),))]]
    )

    def column(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([row[name] for row in rows], dtype=dtype)

    return replace(
        blank,
        behaviour_logprobs_N=column("behaviour"),
        advantages_N=column("advantage"),
        loss_weights_N=torch.tensor([row.get("loss_weight", 1.0) for row in rows], dtype=torch.float64),
        versions_N=column("version", torch.int64),
        oldest_versions_N=column("version", torch.int64),
        sequences_N=column("sequence", torch.int64),
        rollout_ids=tuple(f"g/{number}" for number in range(num_sequences)),
    )


def check(rows: list[Row], training: TrainingConfig, correction: CorrectionConfig) -> dict[str, Any]:
    logprobs = torch.tensor([row["policy"] for row in rows], dtype=torch.float64, requires_grad=True)
    start = torch.tensor([row["start"] for row in rows], dtype=torch.float64)
    held_to = torch.tensor([row["reference"] for row in rows], dtype=torch.float64)
    summed, record = Objective(training, correction, max_context=CONTEXT)(
        batch_of(rows, num_sequences=4),
        logprobs,
        torch.zeros(len(rows)),
        version=VERSION,
        proximal_logprobs_N=start,
        reference_logprobs_N=held_to if training.kl_coef else None,
    )
    summed.backward()
    expected = reference(rows, training, correction)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    scale = 1 + np.abs(expected["slopes"]).max(initial=0.0)
    np.testing.assert_allclose(logprobs.grad.numpy(), expected["slopes"], rtol=1e-9, atol=1e-9 * scale)
    np.testing.assert_allclose(float(summed.detach()), expected["loss"], rtol=1e-9, atol=1e-7 * scale * (1 + len(rows)))
    assert float(record.denominator.sum()) == expected["denominator"]
    assert record.valid_N.tolist() == [row["valid"] for row in rows]
    assert int(record.masked_M.sum()) == expected["masked"]
    return expected


logprob = st.floats(-60, 0)
nonfinite = st.sampled_from([NAN, -INF, INF])
token = st.fixed_dictionaries(
    {
        "policy": logprob,
        "behaviour": st.one_of(logprob, nonfinite),
        "start": st.one_of(logprob, logprob, nonfinite),
        "reference": st.one_of(logprob, logprob, nonfinite),
        "advantage": st.floats(-5, 5),
        "loss_weight": st.sampled_from([1.0, 1.0, 0.25, 0.0]),
        "version": st.integers(0, VERSION),
        "sequence": st.integers(0, 3),
    }
)
near = st.builds(  # ratios near 1, where the bounds are
    lambda row, *offsets: (
        row | {name: row["policy"] + d for name, d in zip(("behaviour", "start", "reference"), offsets, strict=True)}
    ),
    token,
    *[st.floats(-0.6, 0.6)] * 3,
)
trainings = st.builds(
    TrainingConfig,
    loss=st.sampled_from(list(BY_NAME)),
    average=st.sampled_from(["token", "sequence", "constant"]),
    kl_coef=st.sampled_from([0.0, 0.3]),
    kl=st.sampled_from(["k2", "k3"]),
    clip=st.tuples(st.sampled_from([0.2, 1.0]), st.sampled_from([0.28, 5.0])),
)
corrections = st.builds(
    CorrectionConfig,
    proximal=st.sampled_from(["behaviour", "recomputed", "interpolated"]),
    weight=st.sampled_from(["none", "token", "sequence"]),
    cap=st.sampled_from([None, 2.0]),
    mask=st.sampled_from(["none", "token", "sequence", "geometric"]),
    bounds=st.sampled_from([(0.5, 5.0), (0.99, 1.01)]),
    veto=st.sampled_from([None, 1e-4]),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.one_of(token, near), max_size=12), trainings, corrections)
def test_objective_matches_reference_for_any_tokens_and_settings(
    rows: list[Row], training: TrainingConfig, correction: CorrectionConfig
) -> None:
    check(rows, training, correction)


def row_of(**values: Any) -> Row:
    return {
        "policy": -1.0,
        "behaviour": -1.0,
        "start": -1.0,
        "reference": -1.0,
        "advantage": 1.0,
        "version": VERSION,
        "sequence": 0,
    } | values


@pytest.mark.parametrize("loss", BY_NAME)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-90.0, -0.5, -0.1, 0.0, 0.1, 0.5, 90.0])
def test_losses_match_reference_on_each_side_of_the_clip_range(loss: str, advantage: float, log_ratio: float) -> None:
    row = row_of(policy=-100.0 + log_ratio, behaviour=-100.0, advantage=advantage)
    check([row], TrainingConfig(loss=loss), CorrectionConfig())


@pytest.mark.parametrize("loss", BY_NAME)
def test_denominator_is_zero_without_valid_tokens(loss: str) -> None:
    for rows in ([], [row_of(behaviour=NAN)]):
        assert check(rows, TrainingConfig(loss=loss), CorrectionConfig())["denominator"] == 0


def test_ratio_exactly_at_a_bound_is_kept() -> None:
    correction = CorrectionConfig(proximal="recomputed", mask="token", bounds=(0.5, 1.0))
    rows = [row_of(), row_of(start=-0.99, sequence=1)]
    assert check(rows, TrainingConfig(), correction)["masked"] == 1


def test_masked_tokens_stay_in_the_denominator() -> None:
    correction = CorrectionConfig(proximal="recomputed", veto=1e-4)
    rows = [row_of(), row_of(start=-40.0, sequence=1), row_of(sequence=1)]
    expected = check(rows, TrainingConfig(), correction)
    assert (expected["masked"], expected["denominator"]) == (2, 3.0)


def test_interpolated_proximal_uses_the_version_of_each_token() -> None:
    """A hot swap mid-sequence: the newest token keeps its behaviour logprob, the oldest gets nearly the policy's."""
    rows = [row_of(policy=-1.0, behaviour=-2.0, version=version) for version in (VERSION, VERSION - 1, VERSION - 9)]
    correction = CorrectionConfig(proximal="interpolated", weight="token", cap=None)
    expected = check(rows, TrainingConfig(loss="reinforce"), correction)
    np.testing.assert_allclose(expected["slopes"], [-1.0, -np.exp(0.5), -np.exp(0.9)])


def test_splitting_a_batch_preserves_loss_and_denominator() -> None:
    rows = [row_of(policy=-1.0 - i / 10, sequence=i // 2, advantage=i - 2.0) for i in range(6)]
    for average in ("token", "sequence", "constant"):
        training = TrainingConfig(average=average)
        whole = check(rows, training, CorrectionConfig())
        parts = [check(part, training, CorrectionConfig()) for part in (rows[:2], rows[2:])]
        assert sum(part["denominator"] for part in parts) == whole["denominator"]
        np.testing.assert_allclose(sum(part["loss"] for part in parts), whole["loss"])


def capped(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """-min(r_t, 1 + high) * A_t: the ratio is bounded from above, for any sign of the advantage."""
    ratios_N = tokens.log_ratios().exp()
    most = 1 + clip.high
    return TokenLoss(-ratios_N.clamp(max=most) * tokens.advantages_N, ratios_N > most)


def test_custom_loss_from_the_docs_works() -> None:
    assert (
        inspect.getsource(capped).strip()
        in (Path(__file__).parents[2] / "docs" / "concepts" / "training.md").read_text()
    )
    rows = [row_of(policy=-1.0, behaviour=-1.0 - np.log(1.1)), row_of(policy=-1.0, behaviour=-3.0)]
    logprobs = torch.tensor([row["policy"] for row in rows], dtype=torch.float64, requires_grad=True)
    training = TrainingConfig(loss=f"{__name__}:capped", clip=(0.2, 0.25))
    objective = Objective(training, CorrectionConfig(), max_context=CONTEXT)
    summed, stats = objective(batch_of(rows, 1), logprobs, torch.zeros(2), version=VERSION)
    summed.backward()
    np.testing.assert_allclose([summed.item(), *logprobs.grad], [-1.1 - 1.25, -1.1, 0.0])
    assert stats.clipped_M.tolist() == [False, True]
    with pytest.raises(ConfigError, match="has no function thrice"):
        find_loss(f"{__name__}:thrice")
    with pytest.raises(ValueError, match="must be one of grpo, gspo, cispo, reinforce, nll"):
        TrainingConfig(loss="ppo")
