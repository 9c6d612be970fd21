"""Numbers as a person reads them at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks of eight heights, averaged into at most `width` of them. What is not finite is a space.

    Example: `sparkline([0, 1, 2, 3], 4)` is `"▁▃▆█"`.
    """
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        buckets = [values[low:high] for low, high in pairwise(edges)]
    else:
        buckets = [[value] for value in values]
    means = [fmean(bucket) for bucket in buckets]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(
        _BLOCKS[math.floor((mean - low) / span * (len(_BLOCKS) - 1) + 0.5)] if math.isfinite(mean) else " "
        for mean in means
    )


def format_seconds(seconds: float) -> str:
    """`75.2` is `"1 min 15 s"`, `8.25` is `"8.2 s"`, `7260` is `"2 h 1 min"`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
