"""Chunked logprobs and entropies, and their gradients, compared with float64 NumPy."""

from __future__ import annotations

import numpy as np
import torch
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.training.selected_logprobs import selected_logprobs

VOCABULARY, WIDTH = 7, 5


@settings(max_examples=examples(25))
@given(st.lists(st.floats(0.1, 3.0), max_size=9), st.integers(0, 1000), st.sampled_from([1, 14, 21, 1000]))
def test_logprobs_and_gradients_match_reference_at_any_temperature(at: list[float], seed: int, chunk_logits: int):
    num_tokens, temperatures = len(at), np.array(at)[:, None]
    rng = np.random.default_rng(seed)
    hidden, weight = rng.normal(size=(num_tokens, WIDTH)) * 2, rng.normal(size=(VOCABULARY, WIDTH)) * 2
    targets, upstream = rng.integers(0, VOCABULARY, num_tokens), rng.normal(size=num_tokens)
    scaled = hidden @ weight.T / temperatures
    log_softmax = scaled - scaled.max(-1, keepdims=True, initial=-99)
    log_softmax -= np.log(np.exp(log_softmax).sum(-1, keepdims=True))
    one_hot = np.eye(VOCABULARY)[targets]

    x, w = (torch.tensor(each, dtype=torch.float32, requires_grad=True) for each in (hidden, weight))
    logprobs, entropies = selected_logprobs(
        x, w, torch.tensor(targets), torch.tensor(at, dtype=torch.float32), chunk_logits=chunk_logits
    )
    (logprobs * torch.tensor(upstream, dtype=torch.float32)).sum().backward()

    np.testing.assert_allclose(logprobs.detach().numpy(), (log_softmax * one_hot).sum(-1), rtol=1e-4, atol=1e-4)
    probs = np.exp(log_softmax)
    np.testing.assert_allclose(entropies.numpy(), -(probs * log_softmax).sum(-1), rtol=1e-4, atol=1e-4)
    assert not entropies.requires_grad
    assert x.grad is not None
    assert w.grad is not None
    logits_grad = (one_hot - probs) * upstream[:, None] / temperatures
    np.testing.assert_allclose(x.grad.numpy(), logits_grad @ weight, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(w.grad.numpy(), logits_grad.T @ hidden, rtol=1e-3, atol=1e-3)


def test_chunk_size_bounds_intermediate_tensors() -> None:
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(each.numel() for each in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(each))
            return out

    hidden = torch.randn(64, 2, requires_grad=True)
    weight = torch.randn(1000, 2, requires_grad=True)
    with Watch():
        logprobs, _ = selected_logprobs(hidden, weight, torch.arange(64), torch.ones(64), chunk_logits=4000)
        logprobs.sum().backward()
    assert max(sizes) == 4000
