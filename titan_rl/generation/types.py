"""The values that the engine loop and the router share: pauses, KV policies, gauges, pull results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from titan_rl.generation.readback import Readback


class PauseMode(StrEnum):
    """What a pause does with the requests that are running. Whatever takes one takes its value too: "keep".

    Raises:
        ValueError: made of anything else.
    """

    KEEP = "keep"  # frozen where they are; resuming costs nothing
    ABORT = "abort"  # they end with what they have, and new ones end at once
    WAIT = "wait"  # they finish; new ones wait
    SLEEP = "sleep"  # as abort, and engines give their memory back until the next pull or the resume

    @property
    def ends_requests(self) -> bool:
        """Those that run end with what they have."""
        return self in (PauseMode.ABORT, PauseMode.SLEEP)

    @classmethod
    def _missing_(cls, value: object) -> PauseMode:
        raise ValueError(f"pause mode is {value!r}; it must be one of {', '.join(cls)}")


@dataclass(frozen=True, slots=True)
class KVPolicy:
    """What becomes of the KV cache at a swap.

    Args:
        running: "keep" lets running requests go on with KV of the old weights, "recompute" has them prefill again.
        reset_prefix_cache: later requests reuse no KV of the old weights.

    Raises:
        ValueError: running requests cannot be recomputed while their old KV is still offered to them.
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
"""Of two counts of engines that report both, the first over the second."""


@dataclass(frozen=True, slots=True)
class GaugeSummary:
    """What an engine said of itself over some of its steps.

    Example: `GaugeSummary(4, {"running_requests": 10.0}, {"running_requests": 3.0}, {"preemptions": 1.0})`
    """

    num_steps: int
    sums: Mapping[str, float]  # over the steps, of what rises and falls
    maxima: Mapping[str, float]
    totals: Mapping[str, float]  # how much each count has grown

    @staticmethod
    def metrics(summaries: Iterable[GaugeSummary]) -> dict[str, float]:
        """Of several engines together: for each gauge its mean over all their steps and its maximum, each count in
        all, and `SHARES` of counts that are not 0.

        Example, of the one above: {"preemptions": 1.0, "running_requests_max": 3.0, "running_requests_mean": 2.5}
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
        shares = {name: (metrics.get(part, 0.0), metrics.get(whole)) for name, (part, whole) in SHARES.items()}
        return metrics | {name: part / whole for name, (part, whole) in shares.items() if whole}


@dataclass(frozen=True, slots=True)
class PullResult:
    """A pull that succeeded. `version` is newer than asked for where a later pull took this one's place."""

    version: int
    load_s: float
    verify_s: float  # reading back what is held included
    stall_s: float  # how long the engine did not step
    readback_s: float = 0.0
    gauges: GaugeSummary | None = (
        None  # of its steps since the pull before; None where this one took no place of its own
    )
    readback: Readback | None = None  # None where nothing could be read back
