"""Probe sequences: the trainer scores them with what it publishes, a reader scores them with what it has loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from titan_rl.errors import StateDictError, VerificationError
from titan_rl.weights.types import Probe

Score = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""Sequences of [num_tokens] to their logprobs at temperature 1, of the tokens after the first: [num_tokens - 1]."""


def make_probes(score: Score, sequences: Sequence[Sequence[int]]) -> tuple[Probe, ...]:
    """The sequences with the trainer's logprobs.

    Sequences that the policy finds likely are the most exact probes: rounding grows with the size of a logprob.

    Example: `make_probes(score, [[444, 27, 301]])` may give `(Probe((444, 27, 301), (-1.1, -0.4)),)`.

    Raises:
        ValueError: a sequence has fewer than two tokens: the first has no logprob.
        StateDictError: the trainer's own logprobs are not finite, or are too few.
    """
    for ids in sequences:
        if len(ids) < 2:
            raise ValueError(f"probe sequence {list(ids)} is too short; it needs at least 2 tokens")
    if not sequences:
        return ()
    scored = score(sequences)
    _check_lengths(sequences, scored)
    probes = tuple(Probe(tuple(ids), tuple(logprobs)) for ids, logprobs in zip(sequences, scored, strict=True))
    if not all(math.isfinite(logprob) for probe in probes for logprob in probe.logprobs):
        raise StateDictError("the trainer's logprobs of the probe sequences are not finite; its weights are unusable")
    return probes


def verify(probes: Sequence[Probe], score: Score, tolerance: float, *, version: int | None = None) -> float:
    """Score the probes with the weights just loaded; return how far they are from the trainer's logprobs.

    The figure is the mean absolute difference over the tokens of a probe, of the worst probe. A wrong weight moves
    most tokens; rounding moves a few, where the policy is undecided, and some ten times further than the mean.

    0.0 where there are no probes. `version` is for the message.

    Raises:
        VerificationError: the figure is above the tolerance, or not a number.
        StateDictError: `score` gave too few or too many logprobs.
    """
    if not probes:
        return 0.0
    scored = score([probe.token_ids for probe in probes])
    _check_lengths([probe.token_ids for probe in probes], scored)
    means = [
        fmean(abs(mine - theirs) for mine, theirs in zip(logprobs, probe.logprobs, strict=True))
        for probe, logprobs in zip(probes, scored, strict=True)
    ]
    # `max` depends on the order where there is a NaN, and every comparison with it is false.
    worst = math.nan if any(map(math.isnan, means)) else max(means)
    if not worst <= tolerance:
        weights = "the loaded weights" if version is None else f"the weights loaded as version {version}"
        raise VerificationError(
            f"{weights} give probe logprobs that differ from the trainer's by {worst:.3g} on average; "
            f"the tolerance is {tolerance:.3g}"
        )
    return worst


def _check_lengths(sequences: Sequence[Sequence[int]], scored: Sequence[Sequence[float]]) -> None:
    expected, found = [len(ids) - 1 for ids in sequences], [len(logprobs) for logprobs in scored]
    if expected != found:
        raise StateDictError(f"probe sequences were scored with {found} logprobs instead of {expected}")
