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
from titan_rl.weights.manifest import position_of, slices_by_name
from titan_rl.weights.types import Manifest, Probe, TensorSlice

if TYPE_CHECKING:
    import torch

PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}  # elements converted at a time


def with_checksums(manifest: Manifest, named: Iterable[tuple[str, torch.Tensor | TensorSlice]]) -> Manifest:
    """Add checksums of the published tensors to the manifest of one process.

    They are computed from the trainer's own tensors rather than from the transport's copy, so the transport is
    verified, too. If a transport's manifest does not list its tensors, it is returned unchanged.

    Args:
        manifest: Manifest of this process's shard.
        named: The published (name, tensor) pairs.
    """
    if len(manifest.shards) != 1:
        return manifest
    (shard,) = manifest.shards
    slices = [(name, TensorSlice.of(value)) for name, value in named]
    sums = {(name, part.partial_position): _sum(part) for name, part in slices}
    wanted = [(entry.name, entry.position) for entry in shard.entries]
    if not wanted or any(key not in sums for key in wanted):
        return manifest
    values = checksums_of([sums[key] for key in wanted])
    return replace(manifest, shards=(replace(shard, box_checksums=np.array(values, "<u8").tobytes()),))


def published_checksums(manifest: Manifest) -> dict[str, TensorChecksum]:
    """Checksum of each tensor by its Hugging Face name. Empty if a shard has no checksums.

    Raises:
        StateDictError: The slices of a tensor do not make it up, or a shard has more or fewer checksums than tensors.
    """
    if not all(shard.box_checksums or not shard.entries for shard in manifest.shards):
        return {}
    values = [np.frombuffer(shard.box_checksums, "<u8") for shard in manifest.shards]
    for shard, found in zip(manifest.shards, values, strict=True):
        if len(found) != len(shard.entries):
            raise StateDictError(f"{shard.location} has {len(found)} checksums for {len(shard.entries)} tensors")
    index_of = [{id(entry): index for index, entry in enumerate(shard.entries)} for shard in manifest.shards]
    checksums: dict[str, TensorChecksum] = {}
    for name, slices in slices_by_name(manifest).items():
        _, first = slices[0]
        total = sum(int(values[shard][index_of[shard][id(entry)]]) for shard, entry in slices)
        checksums[name] = TensorChecksum(first.dtype, position_of(first).global_shape, total % 2**64)
    return checksums


def _sum(part: TensorSlice) -> torch.Tensor:
    import torch  # imported here, because the controller and rollout workers import this module without needing torch

    tensor: torch.Tensor = part.tensor
    start = part.position.start
    dtype = tensor.dtype if part.dtype is None else getattr(torch, part.dtype)
    piece = PIECE.get(tensor.device.type, PIECE["cuda"])
    if tensor.dtype == dtype or tensor.ndim == 0 or tensor.numel() <= piece:
        return box_sum(tensor.to(dtype), start)
    rows = max(1, piece * len(tensor) // tensor.numel())
    sums = [
        box_sum(tensor[at : at + rows].to(dtype), (start[0] + at, *start[1:])) for at in range(0, len(tensor), rows)
    ]
    return torch.stack(sums).sum()


SIGMAS = 5.0  # number of standard errors of rounding by which a correct swap may be off
LEAST_MARGIN = 0.05  # a correct swap in bfloat16 can be off by 0.04 where independent errors explain only 0.02
MAX_MARGIN = 0.5  # with a wider margin the old weights would pass for the new ones
ANCHOR_MARGIN = 0.1  # smallest part of the change whose absence in every version is detected in the end
RESOLUTION = 1e-6  # nats: smallest error of a logprob in float32

Score = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""Function from sequences of [num_tokens] to the logprobs of their tokens after the first, at temperature 1:
[num_tokens - 1] for each sequence."""


def make_probes(score: Score, sequences: Sequence[Sequence[int]]) -> tuple[Probe, ...]:
    """Make probes of the sequences, with the trainer's logprobs.

    Sequences that are likely under the policy are the most exact probes: rounding grows with the size of a logprob.

    Example: `make_probes(score, [[444, 27, 301]])` may give `(Probe((444, 27, 301), (-1.1, -0.4)),)`.

    Raises:
        ValueError: A sequence has fewer than two tokens; the first token has no logprob.
        StateDictError: The trainer's own logprobs are not finite, or their number is wrong.
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
    """Result of a probe check. `margin` and `missed` refer to the previous version; they are NaN if there is none."""

    diff: float  # distance from the trainer's logprobs in nats; see `SwapCheck.verify`
    margin: float = math.nan  # part of the change that may be missing because rounding hides it
    missed: float = math.nan  # part of the change that is missing, or by which it is exceeded


class SwapCheck:
    """Checks the versions that one reader loads. It compares the reader's logprobs, and their changes from earlier
    versions, with the trainer's.

    Rounding in bfloat16 moves the logprobs of a probe further than a step with a small learning rate does, so closeness
    to the trainer's logprobs does not distinguish a version from the previous one. But rounding has no direction. Over
    the scored tokens of all probes, let c be the trainer's logprobs of this version minus those of an earlier one, and
    f the same difference of the reader's logprobs. Then

        p = (f . c) / (c . c)

    is 1 if everything was loaded, 0 if nothing was, and in between if a layer was left out; p > 1/2 means that the
    reader is nearer to this version than to the earlier one. If each of the reader's logprobs has an error of s, p has
    a standard error of sqrt(2) |s c| / |c|^2. A swap is refused if p differs from 1 by more than 5 standard errors, the
    margin.

    s is estimated from the earlier version: the error of the same token there, or the usual error of a token of that
    probability, whichever is larger. An error of a logit moves the logprob of a token of probability q by 1 - q times
    as much, and so does an update: the tokens that move most have the largest errors, and few of them make up most of
    |c|. The errors of tokens are assumed to be independent. Since this holds only nearly, a margin is at least 0.05.

    With a margin above 1/2 a swap is not refused. The margin shrinks with the root of the number of tokens and with the
    size of the change, so there is a second comparison with an older version, the anchor, which is as old as a margin
    of 0.1 requires. So an engine that keeps its old weights is detected once the policy has moved far enough.

    Example:

        check = SwapCheck()
        check.verify(manifest_of_6, score)  # ProbeFigures(diff=0.004, margin=nan, missed=nan)
        check.verify(manifest_of_7, score)  # ProbeFigures(diff=0.004, margin=0.12, missed=0.03)
    """

    def __init__(self) -> None:
        self._anchor: _Scored | None = None
        self._before: _Scored | None = None

    def verify(self, manifest: Manifest, score: Score) -> ProbeFigures:
        """Score the probes of a version with the weights just loaded, and compare the logprobs with the trainer's.

        The distance of a probe is the mean absolute difference over its tokens, in nats; the worst probe counts.
        Without probes it is 0.0. A wrong weight moves most tokens, whereas rounding moves only a few tokens, at which
        the policy is undecided, about ten times further than the mean.

        Args:
            manifest: Manifest of the version.
            score: Scores sequences with the loaded weights.

        Raises:
            VerificationError: The distance is above the manifest's tolerance or not a number, or the logprobs have not
                changed with the trainer's.
            StateDictError: `score` returned too few or too many logprobs.
        """
        probes, version = manifest.probes, manifest.version
        sequences = [probe.token_ids for probe in probes]
        rows = score(sequences) if probes else []
        _check_lengths(sequences, rows)
        diff = _check_distance(probes, rows, manifest.tolerance, version)
        scored = _Scored.of(probes, rows)
        earlier = (self._before, self._anchor)
        before, anchor = (each if each and each.sequences == scored.sequences else None for each in earlier)
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
    trainer: NDArray[np.float64]  # [num_scored_tokens of all probes]
    reader: NDArray[np.float64]

    @staticmethod
    def of(probes: Sequence[Probe], rows: Sequence[Sequence[float]]) -> _Scored:
        def flat(values: Sequence[Sequence[float]]) -> NDArray[np.float64]:
            return np.array([value for row in values for value in row], np.float64)

        return _Scored(
            tuple(probe.token_ids for probe in probes), flat([probe.logprobs for probe in probes]), flat(rows)
        )

    def errors(self, now: _Scored) -> NDArray[np.float64]:
        """Allowed deviation of the reader's logprobs, for this version or another."""
        own, free = np.abs(self.reader - self.trainer), np.abs(np.expm1(self.trainer))
        usual = float(np.linalg.norm(own)) / max(float(np.linalg.norm(free)), RESOLUTION)
        return np.maximum(own, usual * np.maximum(free, np.abs(np.expm1(now.trainer)))) + RESOLUTION


def _compare(now: _Scored, before: _Scored, version: int) -> tuple[float, float] | None:
    """The margin and the missing part of the change. None if the trainer's logprobs did not change.

    Raises:
        VerificationError: The missing part exceeds the margin.
    """
    change, found = now.trainer - before.trainer, now.reader - before.reader
    size = float(np.linalg.norm(change))
    if not size:
        return None
    margin = max(SIGMAS * math.sqrt(2) * float(np.linalg.norm(before.errors(now) * change)) / size**2, LEAST_MARGIN)
    part = float(found @ change) / size**2
    if margin <= MAX_MARGIN and not abs(part - 1) <= margin:
        raise VerificationError(
            f"the weights loaded as version {version} move the probes' logprobs by {part:.3f} of what they should "
            f"since an earlier version; between {1 - margin:.3f} and {1 + margin:.3f} is rounding. Some of them were "
            "not loaded"
        )
    return margin, abs(part - 1)


def _check_distance(
    probes: Sequence[Probe], scored: Sequence[Sequence[float]], tolerance: float, version: int
) -> float:
    if not probes:
        return 0.0
    means = [
        fmean(abs(own - expected) for own, expected in zip(logprobs, probe.logprobs, strict=True))
        for probe, logprobs in zip(probes, scored, strict=True)
    ]
    # With a NaN the result of `max` depends on the order, and every comparison is false.
    worst = math.nan if any(map(math.isnan, means)) else max(means)
    if not worst <= tolerance:
        raise VerificationError(
            f"the weights loaded as version {version} give probe logprobs that differ from the trainer's by "
            f"{worst:.3g} on average; the tolerance is {tolerance:.3g}"
        )
    return worst


def _check_lengths(sequences: Sequence[Sequence[int]], scored: Sequence[Sequence[float]]) -> None:
    expected, found = [len(ids) - 1 for ids in sequences], [len(logprobs) for logprobs in scored]
    if expected != found:
        raise StateDictError(f"probe sequences were scored with {found} logprobs instead of {expected}")
