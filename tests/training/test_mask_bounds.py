"""Ratios exactly at a mask bound or veto threshold are kept despite float32 rounding of the logprobs."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="needs the cpu or gpu extra")

from titan_rl.training.corrections import correct  # noqa: E402
from titan_rl.training.settings import CorrectionConfig  # noqa: E402

BEHAVIOUR = [0.0, -0.7, -3.3, -11.1]  # logprobs


def kept(ratio: float, behaviour: float, length: int, **settings) -> list[bool]:
    """Whether each token is kept, for a sequence of `length` tokens that all have this ratio."""
    behaviour_N = torch.full((length,), behaviour, dtype=torch.float32)
    proximal_N = torch.full((length,), behaviour + math.log(ratio), dtype=torch.float32)
    correction = correct(
        proximal_N, behaviour_N, torch.zeros(length, dtype=torch.int64), 1, CorrectionConfig(**settings)
    )
    assert torch.equal(correction.masked_N, correction.weights_N == 0)
    return [not masked for masked in correction.masked_N.tolist()]


@pytest.mark.parametrize("behaviour", BEHAVIOUR)
@pytest.mark.parametrize("bounds", [(0.1, 10.0), (0.5, 2.0), (0.3, 5.0), (0.99, 1.01), (1e-4, 3.0)])
@pytest.mark.parametrize("mask", ["token", "geometric", "sequence"])
def test_ratio_at_a_bound_is_kept_and_beyond_it_masked(mask, bounds, behaviour):
    length = 1 if mask == "sequence" else 3
    for bound, outwards in zip(bounds, (0.999, 1.001), strict=True):
        assert all(kept(bound, behaviour, length, mask=mask, bounds=bounds))
        assert not any(kept(bound * outwards, behaviour, length, mask=mask, bounds=bounds))
        assert all(kept(bound / outwards, behaviour, length, mask=mask, bounds=bounds))


@pytest.mark.parametrize("behaviour", BEHAVIOUR)
def test_sequence_ratio_at_a_bound_is_kept(behaviour):
    assert all(kept(0.5, behaviour, 4, mask="sequence", bounds=(0.0625, 2.0)))
    assert all(kept(1.1, behaviour, 2, mask="sequence", bounds=(0.5, 1.21)))
    assert not any(kept(1.1, behaviour, 2, mask="sequence", bounds=(0.5, 1.209)))


@pytest.mark.parametrize("behaviour", BEHAVIOUR)
@pytest.mark.parametrize("veto", [0.1, 1e-4, 0.3])
def test_ratio_at_the_veto_threshold_is_kept(veto, behaviour):
    assert all(kept(veto, behaviour, 3, veto=veto))
    assert not any(kept(veto * 0.999, behaviour, 3, veto=veto))
