"""Types that the engine loop and the router share: pause modes, KV policies, gauges, pull results, and the comparison
of loaded weights with published ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Literal

from titan_rl.core.errors import VerificationError
from titan_rl.core.tensor_checksum import TensorChecksum, box_sum, checksums_of, covers, is_exact_in
from titan_rl.generation.engine import ReadableEngine

if TYPE_CHECKING:
    import torch


class PauseMode(StrEnum):
    """Treatment of running requests during a pause. Functions that take a mode also accept its value: "keep".

    Raises:
        ValueError: the value is not a mode.
    """

    KEEP = "keep"  # requests are frozen; resuming costs nothing
    ABORT = "abort"  # requests end with the tokens they have, and new ones end at once
    WAIT = "wait"  # requests finish; new ones wait
    SLEEP = "sleep"  # like abort, and engines release their memory until the next pull or the resume

    @property
    def ends_requests(self) -> bool:
        """Whether running requests end with the tokens they have."""
        return self in (PauseMode.ABORT, PauseMode.SLEEP)

    @classmethod
    def _missing_(cls, value: object) -> PauseMode:
        raise ValueError(f"pause mode is {value!r}; it must be one of {', '.join(cls)}")


@dataclass(frozen=True, slots=True)
class KVPolicy:
    """Treatment of the KV cache at a weight swap.

    Args:
        running: "keep" lets running requests continue with the KV cache of the old weights; "recompute" makes them
            prefill again.
        reset_prefix_cache: Whether later requests must not reuse the KV cache of the old weights.

    Raises:
        ValueError: `running` is unknown, or it is "recompute" without `reset_prefix_cache`: requests would then be
            recomputed from their old KV cache.
    """

    running: Literal["keep", "recompute"] = "keep"
    reset_prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.running not in ("keep", "recompute"):
            raise ValueError(f"KVPolicy.running is {self.running!r}; it must be 'keep' or 'recompute'")
        if self.running == "recompute" and not self.reset_prefix_cache:
            raise ValueError(
                "KVPolicy.running is 'recompute' and reset_prefix_cache is False: running requests would prefill from "
                "the KV of the old weights; set reset_prefix_cache=True"
            )


SHARES = {
    "prefix_cache_hit_share": ("prefix_cache_hits", "prefix_cache_queries"),
    "accepted_share": ("accepted_tokens", "draft_tokens"),
    "accepted_per_draft": ("accepted_tokens", "drafts"),
}
"""Ratios of two counters, for engines that report both."""


@dataclass(frozen=True, slots=True)
class GaugeSummary:
    """Summary of an engine's gauges over some of its steps.

    Example: `GaugeSummary(4, {"running_requests": 10.0}, {"running_requests": 3.0}, {"preemptions": 1.0})`
    """

    num_steps: int
    sums: Mapping[str, float]  # sums over the steps of each gauge that rises and falls
    maxima: Mapping[str, float]  # maxima of these gauges
    totals: Mapping[str, float]  # growth of each counter

    @staticmethod
    def metrics(summaries: Iterable[GaugeSummary]) -> dict[str, float]:
        """Combine the summaries of several engines: mean and maximum of each gauge over all steps, the sum of each
        counter, and the `SHARES` of counters that are not 0.

        The example above gives {"preemptions": 1.0, "running_requests_max": 3.0, "running_requests_mean": 2.5}.
        """
        metrics: dict[str, float] = {}
        num_steps: dict[str, int] = {}
        for summary in summaries:
            for name, value in summary.totals.items():
                metrics[name] = metrics.get(name, 0.0) + value
            for name, value in summary.maxima.items():
                metrics[f"{name}_max"] = max(metrics.get(f"{name}_max", value), value)
                metrics[f"{name}_mean"] = metrics.get(f"{name}_mean", 0.0) + summary.sums[name]
                num_steps[name] = num_steps.get(name, 0) + summary.num_steps
        metrics |= {f"{name}_mean": metrics[f"{name}_mean"] / count for name, count in num_steps.items()}
        shares = {name: (metrics.get(part, 0.0), metrics.get(total)) for name, (part, total) in SHARES.items()}
        return metrics | {name: part / total for name, (part, total) in shares.items() if total}


@dataclass(frozen=True, slots=True)
class PullResult:
    """A pull that succeeded. `version` is newer than requested if a later pull replaced this one."""

    version: int
    load_s: float
    verify_s: float  # including `readback_s`
    stall_s: float  # time without engine steps
    readback_s: float = 0.0
    gauges: GaugeSummary | None = None  # steps since the previous pull; None if the version was loaded already
    readback: Readback | None = None  # None if nothing could be read back


NAMED = 5  # maximum number of tensors that an error lists


@dataclass(frozen=True, slots=True)
class HeldChecksum:
    """Checksum of a box of a Hugging Face tensor that one rank's engine holds. It can be pickled."""

    name: str
    parameter: str  # the engine's parameter
    start: tuple[int, ...]
    shape: tuple[int, ...]
    value: int


@dataclass(frozen=True, slots=True)
class Readback:
    """Result of a comparison that found no difference.

    Attributes:
        unread: Names of published tensors that were not read back completely.
        unread_share: Share of these tensors in all published elements, from 0 to 1.
    """

    unread: tuple[str, ...]
    unread_share: float


def read_back(engine: object, published: Mapping[str, TensorChecksum]) -> list[HeldChecksum]:
    """Checksums of the published tensors that this rank's engine holds. Empty for an engine that cannot be read.

    A tensor that the engine keeps in another dtype is read if that dtype represents every value of the published one.

    Raises:
        VerificationError: the engine finds that it does not compute with the loaded weights.
    """
    if not published or not isinstance(engine, ReadableEngine):
        return []
    import torch

    found: list[tuple[str, str, tuple[int, ...], tuple[int, ...], int | torch.Tensor]] = []
    for held in engine.held_weights():
        expected = published.get(held.name)
        if expected is None or tuple(held.global_shape) != expected.shape:
            continue
        dtype: torch.dtype = getattr(torch, expected.dtype)
        if held.checksum is not None:
            if held.dtype != dtype:
                continue
            value, shape = held.checksum, tuple(held.shape)
        else:
            if not is_exact_in(held.tensor.dtype, dtype):
                continue
            value, shape = box_sum(held.tensor.to(dtype), held.start), tuple(held.tensor.shape)
        found.append((held.name, held.parameter, tuple(held.start), shape, value))
    sums = [value for *_, value in found if isinstance(value, torch.Tensor)]
    values = iter(checksums_of(sums))
    return [
        HeldChecksum(name, parameter, start, shape, value if isinstance(value, int) else next(values))
        for name, parameter, start, shape, value in found
    ]


def compare(published: Mapping[str, TensorChecksum], held: Iterable[Sequence[HeldChecksum]], version: int) -> Readback:
    """Compare the weights that all ranks of a replica hold with the published ones.

    Each engine parameter that is made of a published tensor must have all elements of that tensor, over all ranks; a
    tied head and its embedding are two parameters. Boxes that several ranks hold must be equal.

    Args:
        held: Checksums of each rank.

    Raises:
        VerificationError: a tensor differs, on any rank.
    """
    boxes: dict[str, dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]]]] = {}
    for each in (each for rank in held for each in rank):
        of_parameter = boxes.setdefault(each.name, {}).setdefault(each.parameter, {})
        of_parameter.setdefault((each.start, each.shape), set()).add(each.value)
    wrong: list[str] = []
    unread: list[str] = []
    for name, expected in published.items():
        parameters = boxes.get(name, {})
        is_covered = bool(parameters)
        for parameter, found in parameters.items():
            if any(len(values) > 1 for values in found.values()):
                wrong.append(f"{name} in {parameter}")
            elif not covers(list(found), expected.shape):
                is_covered = False
            elif sum(value for (value,) in found.values()) % 2**64 != expected.value:
                wrong.append(f"{name} in {parameter}")
        if not is_covered and prod(expected.shape):
            unread.append(name)
    if wrong:
        listed = ", ".join(wrong[:NAMED]) + (f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else "")
        raise VerificationError(
            f"the engine does not hold the weights of version {version}: {len(wrong)} of its tensors differ from what "
            f"was published: {listed}. It has not loaded all of them"
        )
    total = sum(prod(each.shape) for each in published.values())
    share = sum(prod(published[name].shape) for name in unread) / total if total else 1.0
    return Readback(tuple(unread), share)


def describe(readback: Readback) -> str:
    """One line about the tensors that were not read back.

    Example: "1 of 46 tensors were not read back, 0.2% of the weights: model.layers.0.mlp.gate.weight"
    """
    names = ", ".join(readback.unread[:NAMED]) + (", ..." if len(readback.unread) > NAMED else "")
    return f"{len(readback.unread)} tensors, {readback.unread_share:.1%} of the weights, were not read back: {names}"
