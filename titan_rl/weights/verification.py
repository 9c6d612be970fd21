"""Verification of pulled weights: checksums of published tensors, and probe sequences that trainer and reader both
score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError, VerificationError
from titan_rl.core.tensor_checksum import TensorChecksum, box_sum, checksums_of
from titan_rl.weights.manifest import slices_by_name
from titan_rl.weights.types import Manifest, Probe, TensorEntry, TensorSlice

if TYPE_CHECKING:
    import torch

PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}  # elements converted at a time


def with_checksums(manifest: Manifest, named: Iterable[tuple[str, torch.Tensor | TensorSlice]]) -> Manifest:
    """The manifest of what one process has published, with the checksums of what it was given to publish.

    They are taken of the trainer's own tensors rather than of what a transport has copied, so a transport is verified,
    too. A transport whose manifest does not list its tensors stays without.
    """
    if len(manifest.shards) != 1:
        return manifest
    (shard,) = manifest.shards
    sums = {_key(name, value): _sum(value) for name, value in named}
    wanted = [(entry.name, entry.position.start if entry.position else None) for entry in shard.entries]
    if not wanted or any(key not in sums for key in wanted):
        return manifest
    values = checksums_of([sums[key] for key in wanted])
    return replace(manifest, shards=(replace(shard, box_checksums=np.array(values, "<u8").tobytes()),))


def published_checksums(manifest: Manifest) -> dict[str, TensorChecksum]:
    """The checksum of each tensor by its Hugging Face name. Empty where a shard comes without.

    Raises:
        StateDictError: the slices of a tensor do not make it up, or a shard has more or fewer checksums than tensors.
    """
    if not all(shard.box_checksums or not shard.entries for shard in manifest.shards):
        return {}
    values = [np.frombuffer(shard.box_checksums, "<u8") for shard in manifest.shards]
    for shard, found in zip(manifest.shards, values, strict=True):
        if len(found) != len(shard.entries):
            raise StateDictError(f"{shard.location} has {len(found)} checksums for {len(shard.entries)} tensors")
    places = [{id(entry): place for place, entry in enumerate(shard.entries)} for shard in manifest.shards]
    return {
        name: _joined([(entry, int(values[shard][places[shard][id(entry)]])) for shard, entry in slices])
        for name, slices in slices_by_name(manifest).items()
    }


def _joined(slices: list[tuple[TensorEntry, int]]) -> TensorChecksum:
    entry, _ = slices[0]
    shape = entry.position.whole_shape if entry.position else entry.shape
    return TensorChecksum(entry.dtype, shape, sum(value for _, value in slices) % 2**64)


def _key(name: str, value: torch.Tensor | TensorSlice) -> tuple[str, tuple[int, ...] | None]:
    if not isinstance(value, TensorSlice):
        return name, None
    position = value.position
    is_whole = tuple(value.tensor.shape) == position.whole_shape and not any(position.start)
    return name, None if is_whole else position.start


def _sum(value: torch.Tensor | TensorSlice) -> torch.Tensor:
    import torch  # takes seconds, and the controller and rollout workers, which have no tensors, import this module

    piece_of = value if isinstance(value, TensorSlice) else None
    tensor: torch.Tensor = value if piece_of is None else piece_of.tensor  # pyright: ignore[reportAssignmentType]
    start = () if piece_of is None else piece_of.position.start
    dtype = tensor.dtype if piece_of is None or piece_of.dtype is None else getattr(torch, piece_of.dtype)
    piece = PIECE.get(tensor.device.type, PIECE["cuda"])
    if tensor.dtype == dtype or tensor.ndim == 0 or tensor.numel() <= piece:
        return box_sum(tensor.to(dtype), start)
    start = start or (0,) * tensor.ndim
    rows = max(1, piece * len(tensor) // tensor.numel())
    sums = [
        box_sum(tensor[at : at + rows].to(dtype), (start[0] + at, *start[1:])) for at in range(0, len(tensor), rows)
    ]
    return torch.stack(sums).sum()


SIGMAS = 5.0  # of rounding, by which a right swap may miss
LEAST_MARGIN = 0.02
NOTICED = 0.5  # with a wider margin the old weights would pass for the new ones
ANCHOR_MARGIN = 0.1  # a part of the change that is this large and missing in every version is noticed in the end
RESOLUTION = 1e-6  # nats: what a logprob in float32 is off by at least

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


@dataclass(frozen=True, slots=True)
class ProbeFigures:
    """Result of a probe check. `margin` and `missed` refer to the version before; NaN without one."""

    diff: float  # nats: see `verify`
    margin: float = math.nan  # part of the change that may be missed, because rounding hides it
    missed: float = math.nan  # part of the change that is missing, or too much


class SwapCheck:
    """Checks the versions that one reader loads, each against the trainer's logprobs, and by its change from those
    before.

    Rounding in bfloat16 moves the logprobs of a probe further than a step with a small learning rate does, so being
    near to the trainer's tells no version from the one before. But rounding has no direction. Over the scored tokens of
    all probes let c be the trainer's logprobs of this version less those of an earlier one, and f the reader's. Then

        p = (f . c) / (c . c)

    is 1 where everything was loaded, 0 where nothing was, and in between where a layer was left out; p > 1/2 says that
    the reader is nearer to this version than to the earlier one. With an error of s for a token in each of the reader's
    logprobs p has a standard error of sqrt(2) |s c| / |c|^2. A swap is refused where p is off 1 by more than 5 of them,
    the margin.

    Of s the earlier version tells: it is what that token was off by, or what a token of that probability usually was,
    whichever is more. An error of a logit moves the logprob of a token of probability q by 1 - q of it, and so does an
    update: the tokens that move most are those with the largest errors, and few of them make most of |c|.

    Where the margin is above 1/2 nothing is said. It shrinks with the root of the number of tokens and with the size of
    the change, so there is a second comparison with a version further back, the anchor: as old as it has to be for a
    margin of 0.1. An engine that keeps its old weights is found out when the policy has moved far enough.

    Example:

        check = SwapCheck()
        check.verify(probes_of_6, score, 0.1)  # ProbeFigures(diff=0.004, margin=nan, missed=nan)
        check.verify(probes_of_7, score, 0.1)  # ProbeFigures(diff=0.004, margin=0.12, missed=0.03)
    """

    def __init__(self) -> None:
        self._anchor: _Scored | None = None
        self._before: _Scored | None = None

    def verify(
        self, probes: Sequence[Probe], score: Score, tolerance: float, *, version: int | None = None
    ) -> ProbeFigures:
        """Score the probes with the weights just loaded.

        Raises:
            VerificationError: they are not near enough to the trainer's, or have not moved with them.
            StateDictError: `score` gave too few or too many logprobs.
        """
        rows: list[Sequence[float]] = []

        def noting(sequences: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
            rows.extend(score(sequences))
            return rows

        diff = verify(probes, noting, tolerance, version=version)
        scored = _Scored.of(probes, rows)
        before, anchor = (each if each and each.is_of(scored) else None for each in (self._before, self._anchor))
        compared = None if before is None else _compare(scored, before, version)
        anchored = compared if anchor is before else anchor and _compare(scored, anchor, version)
        if anchored is None or anchored[0] <= ANCHOR_MARGIN:
            self._anchor = scored
        self._before = scored
        return ProbeFigures(diff) if compared is None else ProbeFigures(diff, *compared)


@dataclass(frozen=True, slots=True)
class _Scored:
    """One version's probes, as the trainer and as the reader scored them."""

    sequences: tuple[tuple[int, ...], ...]
    theirs: NDArray[np.float64]  # [num_scored_tokens of all probes]
    mine: NDArray[np.float64]

    @staticmethod
    def of(probes: Sequence[Probe], rows: Sequence[Sequence[float]]) -> _Scored:
        def flat(values: Sequence[Sequence[float]]) -> NDArray[np.float64]:
            return np.array([value for row in values for value in row], np.float64)

        return _Scored(
            tuple(probe.token_ids for probe in probes), flat([probe.logprobs for probe in probes]), flat(rows)
        )

    def is_of(self, other: _Scored) -> bool:
        return self.sequences == other.sequences

    def errors(self, now: _Scored) -> NDArray[np.float64]:
        """Allowed deviation of the reader's logprobs, for this version or another."""
        own, free = np.abs(self.mine - self.theirs), np.abs(np.expm1(self.theirs))
        usual = float(np.linalg.norm(own)) / max(float(np.linalg.norm(free)), RESOLUTION)
        return np.maximum(own, usual * np.maximum(free, np.abs(np.expm1(now.theirs)))) + RESOLUTION


def _compare(now: _Scored, before: _Scored, version: int | None) -> tuple[float, float] | None:
    """The margin, and what was missed. None where the trainer's logprobs are the same."""
    change, found = now.theirs - before.theirs, now.mine - before.mine
    size = float(np.linalg.norm(change))
    if not size:
        return None
    margin = max(SIGMAS * math.sqrt(2) * float(np.linalg.norm(before.errors(now) * change)) / size**2, LEAST_MARGIN)
    part = float(found @ change) / size**2
    if margin <= NOTICED and not abs(part - 1) <= margin:
        weights = "the loaded weights" if version is None else f"the weights loaded as version {version}"
        raise VerificationError(
            f"{weights} move the probes' logprobs by {part:.3f} of what they should since an earlier version; "
            f"between {1 - margin:.3f} and {1 + margin:.3f} is rounding. Some of them were not loaded"
        )
    return margin, abs(part - 1)


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
