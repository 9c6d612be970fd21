"""Logprobs, entropies and their gradients against float64 NumPy."""

from __future__ import annotations

import numpy as np
import torch
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.training.policy.logprobs import selected_logprobs


@settings(max_examples=examples(25))
@given(st.lists(st.floats(0.1, 3.0), max_size=5), st.integers(0, 1000))
def test_selected_logprobs_and_their_gradient_at_the_temperature_of_each_token(at: list[float], seed: int):
    num_tokens, temperatures = len(at), np.array(at)[:, None]
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_tokens, 7)) * 10
    targets, upstream = rng.integers(0, 7, num_tokens), rng.normal(size=num_tokens)
    scaled = logits / temperatures
    log_softmax = scaled - np.log(np.exp(scaled - scaled.max(-1, keepdims=True, initial=-99)).sum(-1, keepdims=True))
    log_softmax -= scaled.max(-1, keepdims=True, initial=-99)
    one_hot = np.eye(7)[targets]

    x = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    logprobs, entropies = selected_logprobs(x, torch.tensor(targets), torch.tensor(at))
    (logprobs * torch.tensor(upstream, dtype=torch.float32)).sum().backward()

    np.testing.assert_allclose(logprobs.detach().numpy(), (log_softmax * one_hot).sum(-1), rtol=1e-4, atol=1e-4)
    probs = np.exp(log_softmax)
    np.testing.assert_allclose(entropies.numpy(), -(probs * log_softmax).sum(-1), rtol=1e-4, atol=1e-4)
    assert x.grad is not None
    expected = (one_hot - probs) * upstream[:, None] / temperatures
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-3, atol=1e-4)
    assert not entropies.requires_grad
