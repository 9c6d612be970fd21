"""Probes: made by the trainer, verified by the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from titan_rl.errors import StateDictError, VerificationError
from titan_rl.weights.probes import make_probes, verify


def score(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-(token % 7) / 7 for token in ids[1:]] for ids in sequences]


def shifted(by: float):
    def score_shifted(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scored = score(sequences)
        scored[-1][-1] += by
        return scored

    return score_shifted


SEQUENCES = [[3, 44, 8, 12], [6, 1, 49, 20]]


def test_probes_carry_the_trainers_logprobs_and_verify() -> None:
    probes = make_probes(score, SEQUENCES)
    assert [list(probe.token_ids) for probe in probes] == SEQUENCES
    assert [list(probe.logprobs) for probe in probes] == score(SEQUENCES)
    assert verify(probes, score, 0.0) == 0.0


def test_no_probes_are_no_work() -> None:
    def never(sequences: object) -> list[list[float]]:
        raise AssertionError("scored")

    assert make_probes(never, []) == ()
    assert verify((), never, 1e-5) == 0.0


def test_the_mean_difference_of_the_worst_probe_is_returned_or_raised() -> None:
    probes = make_probes(score, SEQUENCES)
    assert verify(probes, shifted(-0.75), 0.3) == pytest.approx(0.25)  # one of three scored tokens
    with pytest.raises(VerificationError, match=r"version 7 .* 0\.25 on average; the tolerance is 1e-05"):
        verify(probes, shifted(0.75), 1e-5, version=7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_above_every_tolerance(bad: float) -> None:
    probes = make_probes(score, SEQUENCES)
    with pytest.raises(VerificationError):
        verify(probes, shifted(bad), 1e9)
    with pytest.raises(StateDictError, match="not finite"):
        make_probes(shifted(bad), SEQUENCES)


def test_the_wrong_number_of_logprobs_is_an_error() -> None:
    probes = make_probes(score, SEQUENCES)
    with pytest.raises(StateDictError, match=r"\[4, 4\] logprobs instead of \[3, 3\]"):
        verify(probes, lambda sequences: [[0.0] * len(ids) for ids in sequences], 1e-5)


def test_a_sequence_without_a_scored_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[7\] is too short"):
        make_probes(score, [[1, 2], [7]])
