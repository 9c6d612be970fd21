"""Probe sequences: the trainer scores them with what it publishes, a reader scores them with what it has loaded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from titan_rl.errors import StateDictError, VerificationError
from titan_rl.statedict.types import Probe

Score = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""Sequences of [num_tokens] to their logprobs at temperature 1, of the tokens after the first: [num_tokens - 1]."""


def make_probes(
    score: Score, vocab_size: int, num_probes: int = 4, length: int = 16, seed: int = 0
) -> tuple[Probe, ...]:
    """Uniformly random token sequences, the same for the same arguments, with the trainer's logprobs.

    Random tokens reach more of the vocabulary than text does, and their small logprobs magnify differences.

    Example: `make_probes(score, vocab_size=550, num_probes=1, length=3)` may give
    `(Probe(token_ids=(444, 27, 301), logprobs=(-7.1, -6.4)),)`.

    Raises:
        ValueError: an argument makes no probe.
        StateDictError: the trainer's own logprobs are not finite, or are too few.
    """
    if vocab_size < 1 or num_probes < 0 or length < 2:
        raise ValueError(
            f"vocab_size is {vocab_size}, num_probes {num_probes} and length {length}; "
            "they must be at least 1, 0 and 2: the first token of a sequence has no logprob"
        )
    if num_probes == 0:
        return ()
    rng = random.Random(seed)
    sequences = [tuple(rng.randrange(vocab_size) for _ in range(length)) for _ in range(num_probes)]
    scored = score(sequences)
    _check_lengths(sequences, scored)
    probes = tuple(Probe(ids, tuple(logprobs)) for ids, logprobs in zip(sequences, scored, strict=True))
    if not all(math.isfinite(logprob) for probe in probes for logprob in probe.logprobs):
        raise StateDictError("the trainer's logprobs of the probe sequences are not finite; its weights are unusable")
    return probes


def verify(probes: Sequence[Probe], score: Score, tolerance: float, *, version: int | None = None) -> float:
    """Score the probes with the weights just loaded; return the largest absolute difference of a logprob.

    0.0 where there are no probes. `version` is for the message.

    Raises:
        VerificationError: the difference is above the tolerance, or not a number.
        StateDictError: `score` gave too few or too many logprobs.
    """
    if not probes:
        return 0.0
    scored = score([probe.token_ids for probe in probes])
    _check_lengths([probe.token_ids for probe in probes], scored)
    differences = [
        abs(mine - theirs)
        for probe, logprobs in zip(probes, scored, strict=True)
        for theirs, mine in zip(probe.logprobs, logprobs, strict=True)
    ]
    # `max` depends on the order where there is a NaN, and every comparison with it is false.
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    if not largest <= tolerance:
        weights = "the loaded weights" if version is None else f"the weights loaded as version {version}"
        raise VerificationError(
            f"{weights} give probe logprobs that differ from the trainer's by {largest:.3g}; "
            f"the tolerance is {tolerance:.3g}"
        )
    return largest


def _check_lengths(sequences: Sequence[Sequence[int]], scored: Sequence[Sequence[float]]) -> None:
    expected, found = [len(ids) - 1 for ids in sequences], [len(logprobs) for logprobs in scored]
    if expected != found:
        raise StateDictError(f"probe sequences were scored with {found} logprobs instead of {expected}")
