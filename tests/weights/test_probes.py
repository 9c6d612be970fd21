"""Probes, which the trainer makes and the reader verifies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError, VerificationError
from titan_rl.weights.types import Manifest, Probe
from titan_rl.weights.verification import Score, SwapCheck, make_probes


def score(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-(token % 7) / 7 for token in ids[1:]] for ids in sequences]


def shifted(by: float):
    def score_shifted(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scored = score(sequences)
        scored[-1][-1] += by
        return scored

    return score_shifted


def verify(probes: Sequence[Probe], score: Score, tolerance: float, version: int = 0) -> float:
    return SwapCheck().verify(Manifest(version, (), tuple(probes), tolerance), score).diff


SEQUENCES = [[3, 44, 8, 12], [6, 1, 49, 20]]


def test_probes_carry_the_trainers_logprobs_and_verify() -> None:
    probes = make_probes(score, SEQUENCES)
    assert [list(probe.token_ids) for probe in probes] == SEQUENCES
    assert [list(probe.logprobs) for probe in probes] == score(SEQUENCES)
    assert verify(probes, score, 0.0) == 0.0


def test_no_probes_need_no_scoring() -> None:
    def never(sequences: object) -> list[list[float]]:
        raise AssertionError("scored")

    assert make_probes(never, []) == ()
    assert verify((), never, 1e-5) == 0.0


def test_verify_uses_the_mean_difference_of_the_worst_probe() -> None:
    probes = make_probes(score, SEQUENCES)
    assert verify(probes, shifted(-0.75), 0.3) == pytest.approx(0.25)  # one of three scored tokens
    with pytest.raises(VerificationError, match=r"version 7 .* 0\.25 on average; the tolerance is 1e-05"):
        verify(probes, shifted(0.75), 1e-5, version=7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_logprobs_exceed_every_tolerance(bad: float) -> None:
    probes = make_probes(score, SEQUENCES)
    with pytest.raises(VerificationError):
        verify(probes, shifted(bad), 1e9)
    with pytest.raises(StateDictError, match="not finite"):
        make_probes(shifted(bad), SEQUENCES)


def test_wrong_number_of_logprobs_is_an_error() -> None:
    probes = make_probes(score, SEQUENCES)
    with pytest.raises(StateDictError, match=r"\[4, 4\] logprobs instead of \[3, 3\]"):
        verify(probes, lambda sequences: [[0.0] * len(ids) for ids in sequences], 1e-5)


def test_rejects_a_sequence_without_a_scored_token() -> None:
    with pytest.raises(ValueError, match=r"\[7\] is too short"):
        make_probes(score, [[1, 2], [7]])


NUM_PROBES, LENGTH = 32, 32
BFLOAT16, FLOAT32 = 5e-3, 5e-7
"""Error of a generator's logprobs, in nats, measured with a random Qwen3 on a CPU."""


class Policy:
    """Logprobs of probes under versions of a policy. The update of each layer moves them."""

    def __init__(self, seed: int, *, layers: int = 4, step: float, error: float) -> None:
        self.random = np.random.default_rng(seed)
        self.error = error
        size = NUM_PROBES, LENGTH - 1
        self.start = -self.random.exponential(2.0, size)
        self.updates = self.random.normal(0, step / layers**0.5, (layers, *size))  # the same in each step

    def trainer(self, version: int) -> NDArray[np.float64]:
        return self.start + version * self.updates.sum(0)

    def probes(self, version: int) -> tuple[Probe, ...]:
        return tuple(Probe((7,) * LENGTH, tuple(row)) for row in self.trainer(version).tolist())

    def engine(self, version: int, *, lacks: float | NDArray[np.float64] = 0.0) -> list[list[float]]:
        """Logprobs of an engine at a version, minus the change `lacks` that it has not loaded."""
        rounding = self.random.normal(0, self.error, self.start.shape)
        return (self.trainer(version) - lacks + rounding).tolist()


def check(swaps: SwapCheck, policy: Policy, version: int, scored: list[list[float]]) -> tuple[float, float]:
    figures = swaps.verify(Manifest(version, (), policy.probes(version), 0.1), lambda _: scored)
    return figures.margin, figures.missed


@pytest.mark.parametrize(("step", "error"), [(0.02, BFLOAT16), (0.0005, BFLOAT16), (1e-4, FLOAT32)])
def test_correct_swaps_pass_despite_rounding(step: float, error: float) -> None:
    for seed in range(100):
        policy, swaps = Policy(seed, step=step, error=error), SwapCheck()
        for version in range(20):
            check(swaps, policy, version, policy.engine(version))


def test_correct_swaps_pass_when_rounding_hits_the_moving_tokens() -> None:
    """As in a policy that is certain of most tokens."""
    for seed in range(20):
        random, swaps = np.random.default_rng(seed), SwapCheck()
        theirs = -(random.exponential(0.5, (NUM_PROBES, LENGTH - 1)) ** 2)
        for version in range(20):
            free = 1 - np.exp(theirs)
            scored = (theirs + random.normal(0, 0.03, theirs.shape) * free).tolist()
            probes = tuple(Probe((7,) * LENGTH, tuple(row)) for row in theirs.tolist())
            swaps.verify(Manifest(version, (), probes, 0.1), lambda _, scored=scored: scored)
            theirs = np.minimum(theirs + 0.1 * random.standard_t(3, theirs.shape) * free, -1e-3)


def test_rounding_may_hit_tokens_that_were_exact_in_the_previous_version() -> None:
    """The allowed error of each token includes the usual error of all tokens, scaled by its uncertainty."""
    swaps, half = SwapCheck(), np.arange(8) % 2
    theirs, reads = np.full(8, -1.0), np.full(8, -1.0) + 0.01 * half
    for change, error in ((0.0, 0.0), (0.1, 0.01)):
        theirs, reads = theirs - change * (1 - half), reads - (change + error) * (1 - half)
        probe = Probe((7,) * 9, tuple(theirs.tolist()))
        swaps.verify(Manifest(int(change > 0), (), (probe,), 0.1), lambda _, reads=reads: [reads.tolist()])


def test_correct_swap_passes_if_rounding_hides_a_little_of_the_change() -> None:
    policy, swaps = Policy(0, step=0.05, error=FLOAT32), SwapCheck()
    change = policy.trainer(1) - policy.trainer(0)
    check(swaps, policy, 0, policy.engine(0))
    assert check(swaps, policy, 1, policy.engine(1, lacks=0.04 * change)) == pytest.approx((0.05, 0.04), rel=1e-3)
    with pytest.raises(VerificationError, match=r"by 0\.9[0-9]+ of what they should"):
        check(swaps, policy, 2, policy.engine(2, lacks=(0.04 + 0.08) * change))


@pytest.mark.parametrize("error", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("layer", range(4))
def test_missing_update_of_one_layer_is_caught_below_the_tolerance(layer: int, error: float) -> None:
    policy, swaps = Policy(layer, step=0.02, error=error), SwapCheck()
    check(swaps, policy, 0, policy.engine(0))
    with pytest.raises(VerificationError, match=r"version 1 move .* by 0\.[5-9].* Some of them were not loaded"):
        check(swaps, policy, 1, policy.engine(1, lacks=policy.updates[layer]))
    margin, missed = check(swaps, policy, 1, policy.engine(1))  # loaded again, completely
    assert missed <= margin < 0.1


def test_update_that_was_loaded_twice_is_caught() -> None:
    policy, swaps = Policy(0, step=0.02, error=FLOAT32), SwapCheck()
    check(swaps, policy, 0, policy.engine(0))
    change = policy.trainer(1) - policy.trainer(0)
    with pytest.raises(VerificationError, match=r"move the probes' logprobs by 2\.0"):
        check(swaps, policy, 1, policy.engine(1, lacks=-change))


def test_swap_without_effect_is_caught() -> None:
    policy, swaps = Policy(0, step=0.005, error=BFLOAT16), SwapCheck()
    check(swaps, policy, 6, policy.engine(6))
    with pytest.raises(VerificationError, match=r"by -?0\.0"):
        check(swaps, policy, 7, policy.engine(6))


def test_stuck_weights_are_caught_over_several_small_steps() -> None:
    policy, swaps = Policy(0, step=0.0005, error=BFLOAT16), SwapCheck()
    stuck = policy.engine(0)
    margin, _ = check(swaps, policy, 0, stuck)
    assert math.isnan(margin)
    margins: list[float] = []

    def keep_pulling() -> None:
        margins.extend(check(swaps, policy, version, stuck)[0] for version in range(1, 20))

    with pytest.raises(VerificationError):
        keep_pulling()
    assert 1 <= len(margins) < 10
    assert min(margins) > 0.5, "a single step is enough"


def test_layer_never_loaded_is_caught_once_above_rounding() -> None:
    policy, swaps = Policy(0, step=0.002, error=BFLOAT16), SwapCheck()

    def keep_pulling() -> None:
        for version in range(20):
            check(swaps, policy, version, policy.engine(version, lacks=version * policy.updates[2]))

    with pytest.raises(VerificationError):
        keep_pulling()


def test_unchanged_versions_and_other_probes_are_not_compared() -> None:
    policy, swaps = Policy(0, step=0.0, error=BFLOAT16), SwapCheck()
    check(swaps, policy, 0, policy.engine(0))
    assert math.isnan(check(swaps, policy, 1, policy.engine(1))[0])
    others = (Probe((1, 2), (-1.0,)),)
    assert math.isnan(swaps.verify(Manifest(2, (), others, 0.1), lambda _: [[-1.0]]).margin)
    assert math.isnan(swaps.verify(Manifest(3, ()), lambda _: []).margin)
