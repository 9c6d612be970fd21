"""Expected gradients of training on constrained samples, computed by enumeration.

The policy is a table of logits by position and last token, small enough to enumerate every text. The constraint forbids
some tokens, so the sampler draws from pi(t | s) [t allowed] / Z(s). Each text passes through `build_samples` and the
objective, weighted by its probability under the sampler. The sum is the expected gradient.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from titan_rl.rollout.types import Rollout, RolloutGroup, Turn
from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.training.objective import Objective
from titan_rl.training.settings import CorrectionConfig, TrainingConfig
from titan_rl.training.tensor_batch import make_tensor_batch
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

VOCAB, LENGTH, TEMPERATURE, CONTEXT = 4, 3, 0.7, 16
PROMPT = [0]
SAMPLING = SamplingParams(
    LENGTH, temperature=TEMPERATURE, constraint=json.dumps({"of": "this test"}), stop_token_ids=(3,)
)
MODES = ("masked", "trained", "corrected", "corrected_by_token")


def policy() -> torch.Tensor:
    """Logits by position and last token.  # [LENGTH, VOCAB, VOCAB]"""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(LENGTH, VOCAB, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()


def allowed(position: int, last: int) -> list[int]:
    """Allowed tokens: all at the last position after a 2, otherwise neither 3 nor the last token."""
    if position == LENGTH - 1 and last == 2:
        return list(range(VOCAB))
    return [token for token in range(VOCAB) if token != 3 and token != last]


def reward(text: Sequence[int]) -> float:
    return float(text[0] == 1) + 0.5 * text[1] - text[2] * 0.3


def logprobs(logits: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
    """Logprobs at the sampling temperature.  # [LENGTH]"""
    table = (logits / TEMPERATURE).log_softmax(-1)
    return torch.stack(
        [table[at, last, token] for at, (last, token) in enumerate(itertools.pairwise([*PROMPT, *text]))]
    )


def log_allowed_mass(logits: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
    """Log probability of the allowed tokens, log Z.  # [LENGTH]"""
    table = (logits / TEMPERATURE).log_softmax(-1)
    before = [*PROMPT, *text][:LENGTH]
    chances = [(table[at, last], allowed(at, last)) for at, last in enumerate(before)]
    return torch.stack([row[ids].logsumexp(-1) if len(ids) < VOCAB else row.sum() * 0 for row, ids in chances])


def texts() -> list[tuple[int, ...]]:
    """All texts that the constraint allows."""
    return [
        text
        for text in itertools.product(range(VOCAB), repeat=LENGTH)
        if all(token in allowed(at, last) for at, (last, token) in enumerate(itertools.pairwise([*PROMPT, *text])))
    ]


def expected_gradient(logits: torch.Tensor, constrained: Any, **training: Any) -> torch.Tensor:
    """Expected gradient of the library's loss under the constrained sampler."""
    settings = TrainingConfig(**{"loss": "reinforce", "average": "constant", **training})
    objective = Objective(settings, CorrectionConfig(constrained=constrained), max_context=CONTEXT)
    total = torch.zeros_like(logits)
    for text in texts():
        with torch.no_grad():
            own, log_z = logprobs(logits, text), log_allowed_mass(logits, text)
        sampled = (own - log_z).tolist()  # engines return logprobs of the constrained distribution
        spans = (VersionSpan(0, LENGTH),)
        completion = Completion(
            "r", text, sampled, FinishReason.LENGTH, spans, allowed_logprobs=log_z.clamp(max=0).tolist()
        )
        rollout = Rollout("g/0", "g", 0, None, turns=[Turn(PROMPT, completion, sampling=SAMPLING)])
        rollout.advantage = reward(text)
        samples = build_samples(RolloutGroup("g", None, [rollout]), constrained=constrained)
        if not samples:
            continue
        batch = make_tensor_batch([[Family((samples[0],))]])
        trained = torch.tensor(list(samples[0].loss_mask))[len(PROMPT) :]
        logprobs_N = logprobs(logits, text)[trained]
        summed, _ = objective(batch, logprobs_N, torch.zeros(len(logprobs_N)), version=0)
        (gradient,) = torch.autograd.grad(summed, logits)
        total += math.exp(sum(sampled)) * gradient
    return total


def policy_gradient(logits: torch.Tensor, *, weights: Any) -> torch.Tensor:
    """-sum over allowed texts of the advantage times the weighted gradients of the token logprobs."""
    loss = torch.zeros((), dtype=torch.float64)
    for text in texts():
        own, log_z = logprobs(logits, text), log_allowed_mass(logits, text)
        loss = loss - reward(text) * (weights(own.detach(), log_z.detach()) * own).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    return gradient


def test_enumerated_text_probabilities_sum_to_one() -> None:
    logits = policy().detach()
    under_constraint = [
        (logprobs(logits, text) - log_allowed_mass(logits, text)).sum().exp().item() for text in texts()
    ]
    alone = [logprobs(logits, text).sum().exp().item() for text in texts()]
    assert sum(under_constraint) == pytest.approx(1)
    assert sum(alone) < 0.6


@pytest.mark.parametrize("loss", ["reinforce", "grpo", "cispo"])
def test_corrected_gradient_is_unbiased_for_the_unconstrained_policy(loss: str) -> None:
    logits = policy()
    wanted = policy_gradient(logits, weights=lambda own, log_z: own.sum().exp())
    got = expected_gradient(logits, "corrected", loss=loss)
    assert wanted.abs().max() > 0.05
    assert torch.allclose(got, wanted, atol=1e-6)
    for other in ("masked", "trained", "corrected_by_token"):
        assert not torch.allclose(expected_gradient(logits, other, loss=loss), wanted, atol=1e-2), other


def test_corrected_by_token_weights_each_token_by_its_allowed_mass() -> None:
    logits = policy()
    wanted = policy_gradient(logits, weights=lambda own, log_z: (own - log_z).sum().exp() * log_z.exp())
    assert torch.allclose(expected_gradient(logits, "corrected_by_token"), wanted, atol=1e-6)


def test_trained_mode_applies_no_correction() -> None:
    logits = policy()
    wanted = policy_gradient(logits, weights=lambda own, log_z: (own - log_z).sum().exp())
    assert torch.allclose(expected_gradient(logits, "trained"), wanted, atol=1e-6)


def test_masked_mode_trains_only_unconstrained_tokens() -> None:
    logits = policy()
    got = expected_gradient(logits, "masked")
    free = torch.zeros_like(logits, dtype=torch.bool)
    free[LENGTH - 1, 2] = True  # the only context in which every token is allowed
    assert (got[~free] == 0).all()
    wanted = policy_gradient(logits, weights=lambda own, log_z: (own - log_z).sum().exp() * (log_z == 0))
    assert got[free].abs().max() > 0.01
    assert torch.allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("constrained", MODES)
def test_on_policy_ratios_are_one_under_a_constraint(constrained: Any) -> None:
    """On-policy tokens have a log-ratio of 0 and are not clipped."""
    logits, settings = policy(), TrainingConfig(loss="grpo", clip=(0.01, 0.01))
    objective = Objective(settings, CorrectionConfig(constrained=constrained), max_context=CONTEXT)
    text = (1, 2, 0)
    with torch.no_grad():
        own, log_z = logprobs(logits, text), log_allowed_mass(logits, text)
    spans = (VersionSpan(0, LENGTH),)
    completion = Completion(
        "r", text, (own - log_z).tolist(), FinishReason.LENGTH, spans, allowed_logprobs=log_z.clamp(max=0).tolist()
    )
    rollout = Rollout("g/0", "g", 0, None, turns=[Turn(PROMPT, completion, sampling=SAMPLING)], advantage=-1.0)
    (sample,) = build_samples(RolloutGroup("g", None, [rollout]), constrained=constrained)
    trained = torch.tensor(list(sample.loss_mask))[len(PROMPT) :]
    batch = make_tensor_batch([[Family((sample,))]])
    _, stats = objective(batch, own[trained], torch.zeros(int(trained.sum())), version=0)
    assert stats.log_ratio_M.abs().max() < 1e-6
    assert not stats.clipped_M.any()
