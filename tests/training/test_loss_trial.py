"""Trial of a custom loss, as in a dry run."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch

from titan_rl.training.losses import BY_NAME, ClipRange, LossTokens, TokenLoss, loss_problem


def good(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    ratios_N = tokens.log_ratios().exp()
    return TokenLoss(-clip.clamp(ratios_N) * tokens.advantages_N, ratios_N > 1 + clip.high)


def raising(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    raise ValueError("boom")


def summed(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    return TokenLoss(tokens.logprobs_N.sum(), tokens.logprobs_N > 0)


def bare(tokens: LossTokens, clip: ClipRange) -> torch.Tensor:
    return tokens.logprobs_N


def detached(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    return TokenLoss(tokens.logprobs_N.detach(), tokens.logprobs_N > 0)


def infinite(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    return TokenLoss((tokens.logprobs_N + 1).log(), tokens.logprobs_N > 0)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("my_losses_on_trial")
    module.__dict__.update({loss.__name__: loss for loss in (good, raising, summed, bare, detached, infinite)})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        ("raising", "ValueError: boom"),
        ("summed", r"loss_N has the shape \(\); it must have a value for each token, \(4,\)"),
        ("bare", "it returned Tensor; it must return a TokenLoss"),
        ("detached", "loss_N has no gradient"),
        ("infinite", "each must be finite"),
    ],
)
def test_invalid_loss_error_names_the_problem(named: str, loss: str, problem: str) -> None:
    message = loss_problem(f"{named}:{loss}", ClipRange(0.2, 0.3))
    assert message is not None
    assert re.search(problem, message)
    assert message.startswith(f"training.loss = '{named}:{loss}' on four tokens")


def test_valid_loss_has_no_problem(named: str) -> None:
    assert loss_problem(f"{named}:good", ClipRange(0.2, 0.3)) is None
    for name, path in BY_NAME.items():
        assert loss_problem(name, ClipRange(0.2, 0.3)) is None
        assert loss_problem(path, ClipRange(0.2, 0.3)) is None
