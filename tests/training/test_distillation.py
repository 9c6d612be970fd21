"""Distillation compared with float64 references: values, gradients and the denominator of the loss term."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from titan_rl.training.choices import DistillKind
from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.divergence import divergence
from titan_rl.training.objective import Objective
from titan_rl.training.selected_logprobs import selected_logprobs
from titan_rl.training.settings import CorrectionConfig, TrainingConfig
from titan_rl.training.tensor_batch import TensorBatch, make_tensor_batch
from titan_rl.types import PromptScores

VOCAB, TOP, CONTEXT = 7, 3, 64
KINDS: tuple[DistillKind, ...] = ("forward", "reverse")


def expected(kind: DistillKind, p: Any, q: Any) -> float:
    """KL divergence over K tokens and the remaining mass, computed in NumPy."""
    p, q = np.append(p, 1 - p.sum()), np.append(q, 1 - q.sum())
    one, other = (q, p) if kind == "forward" else (p, q)
    return float(sum(a * (np.log(a) - np.log(b)) for a, b in zip(one, other, strict=True)))


def distributions(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy logits, and the teacher's top tokens with their logprobs, in float64."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, VOCAB, generator=random, dtype=torch.float64)
    taught = torch.randn(size, VOCAB, generator=random, dtype=torch.float64).log_softmax(-1)
    top = taught.topk(TOP, dim=-1)
    return logits, top.indices, top.values


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_and_gradient_match_a_float64_reference(kind: DistillKind):
    logits, ids, taught = distributions(0, 5)
    logits.requires_grad_()
    value = divergence(kind, logits.log_softmax(-1).gather(-1, ids), taught)
    value.sum().backward()
    assert logits.grad is not None
    for n in range(5):

        def at(shifted: np.ndarray[Any, Any], n: int = n) -> float:
            p = np.exp(shifted - shifted.max())
            return expected(kind, (p / p.sum())[ids[n].numpy()], np.exp(taught[n].numpy()))

        whole = logits[n].detach().numpy()
        assert value[n].item() == pytest.approx(at(whole), rel=1e-12)
        for v in range(VOCAB):
            step = np.eye(VOCAB)[v] * 1e-6
            slope = (at(whole + step) - at(whole - step)) / 2e-6
            assert logits.grad[n, v].item() == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_divergence_is_exact_when_one_token_is_left_out(kind: DistillKind):
    logits, _, _ = distributions(1, 4)
    taught = torch.randn(4, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    top = taught.topk(VOCAB - 1, dim=-1)
    policy = logits.log_softmax(-1)
    one, other = (taught, policy) if kind == "forward" else (policy, taught)
    whole = (one.exp() * (one - other)).sum(-1)
    assert divergence(kind, policy.gather(-1, top.indices), top.values).allclose(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_is_finite_for_tokens_of_zero_probability(kind: DistillKind):
    policy = torch.tensor([[0.0, -9999.0], [-0.1, -3.0]], requires_grad=True)
    value = divergence(kind, policy, torch.tensor([[-9999.0, 0.0], [0.0, -9999.0]]))
    value.sum().backward()
    assert value.isfinite().all()
    assert policy.grad is not None
    assert policy.grad.isfinite().all()


def test_logprobs_of_several_targets_match_log_softmax():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(VOCAB, 4, requires_grad=True)
    targets = torch.tensor([[1, 2, 2], [0, 6, 1], [3, 3, 3], [5, 4, 0], [6, 0, 2], [1, 0, 5]])
    temperatures, weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.3]), torch.randn(6, 3)
    plain = ((hidden @ weight.T) / temperatures[:, None]).log_softmax(-1).gather(-1, targets)
    wanted = torch.autograd.grad((plain * weights).sum(), (hidden, weight))
    for chunk in (VOCAB * 2, 2**20):
        logprobs, _ = selected_logprobs(hidden, weight, targets, temperatures, chunk_logits=chunk)
        assert logprobs.allclose(plain, atol=1e-6)
        found = torch.autograd.grad((logprobs * weights).sum(), (hidden, weight))
        assert all(one.allclose(other, atol=1e-5) for one, other in zip(found, wanted, strict=True))


def sample_of(number: int, scored: bool, length: int = 3) -> TrainingSample:
    size = length + 1
    nan = float("nan")
    ids, logprobs = [number % VOCAB, 1, 2] * size, [-0.7, -1.5, -2.5] * size
    teacher = PromptScores([nan] * size, TOP, ids, [nan] * TOP + logprobs[TOP:]) if scored else None
    mask, blank = [False, *[True] * length], [0.0] * size
    return TrainingSample(
        f"g{number}", f"g{number}/0", [1] * size, mask, blank, [0.5] * size, [0] * size, 1.0, teacher=teacher
    )


def batch_of(*samples: TrainingSample) -> TensorBatch:
    return make_tensor_batch([[Family((sample,)) for sample in samples]])


def objective_of(kind: DistillKind, coef: float = 2.0, correction: CorrectionConfig | None = None) -> Objective:
    training = TrainingConfig(distill_coef=coef, distill=kind, teacher="t", advantage="zero")
    return Objective(training, correction or CorrectionConfig(), max_context=CONTEXT)


@pytest.mark.parametrize("kind", KINDS)
def test_distillation_term_is_averaged_over_scored_tokens(kind: DistillKind):
    batch, objective = batch_of(sample_of(0, scored=True), sample_of(1, scored=False, length=6)), objective_of(kind)
    assert objective.counts(batch) == (9.0, 3.0)
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(9, VOCAB, generator=random, dtype=torch.float64, requires_grad=True)
    assert batch.teacher is not None
    policy = logits.log_softmax(-1)
    batch = replace(batch, advantages_N=torch.zeros(9))
    taught_NK = policy.gather(-1, batch.teacher.ids_NK)
    logprobs = policy[:, 0]
    summed, stats = objective(
        replace(batch, behaviour_logprobs_N=logprobs.detach()),
        logprobs,
        torch.zeros(9),
        version=0,
        taught_logprobs_NK=taught_NK,
        taught_share=9 / 3,
    )
    loss = summed / stats.denominator.sum()
    q = np.exp(np.array([-0.7, -1.5, -2.5], np.float32).astype(np.float64))
    each = [expected(kind, policy[n].detach().exp().numpy()[batch.teacher.ids_NK[n].numpy()], q) for n in range(3)]
    assert loss.item() == pytest.approx(2.0 * np.mean(each), rel=1e-6)
    assert stats.taught_M[:3].tolist() == pytest.approx(each, rel=1e-6)
    assert stats.taught_M[3:].isnan().all()
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[:3].abs().sum() > 0
    assert logits.grad[3:].abs().sum() == 0


def test_masked_tokens_get_no_distillation_gradient():
    batch = batch_of(sample_of(0, scored=True))
    policy = torch.full((3, TOP), -1.5, requires_grad=True)
    logprobs = torch.tensor([-1.0, -9.0, -1.0])
    correction = CorrectionConfig(proximal="recomputed", mask="token", bounds=(0.5, 2.0))
    summed, _ = objective_of("reverse", correction=correction)(
        replace(batch, behaviour_logprobs_N=torch.full((3,), -1.0)),
        logprobs,
        torch.zeros(3),
        version=0,
        taught_logprobs_NK=policy,
    )
    summed.backward()
    assert policy.grad is not None
    assert (policy.grad.abs().sum(-1) > 0).tolist() == [True, False, True]


@pytest.mark.parametrize("kind", ["sampled", *KINDS])
def test_zero_weight_and_sampled_kl_add_no_distillation_term(kind: DistillKind):
    assert not Objective(TrainingConfig(), CorrectionConfig(), max_context=CONTEXT).distills
    assert objective_of(kind).distills == (kind != "sampled")


def test_sampled_token_advantage_gives_the_reverse_kl_gradient():
    """Enumeration: the expected policy gradient with A = log q - log p is minus the gradient of KL(p || q)."""
    logits, _, _ = distributions(4, 1)
    taught = torch.randn(1, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    logits.requires_grad_()
    policy = logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - taught)).sum(), logits, retain_graph=True)
    advantages = (taught - policy).detach()
    (found,) = torch.autograd.grad(-(policy.exp().detach() * advantages * policy).sum(), logits)
    assert found.allclose(wanted)
