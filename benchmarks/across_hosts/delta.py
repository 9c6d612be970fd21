"""Bytes that a step of the example changes, in bfloat16 and at a usual learning rate, and the savings by deltas."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.across_hosts.ends import End, capped_ends, seconds_of
from benchmarks.across_hosts.kept_versions import versions_of_a_run
from benchmarks.paired import Spread, report

STEPS = 6
LR = 3e-6
MBIT = 100
NEVER = 1 << 30


def measure(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        versions = versions_of_a_run(folder, steps=STEPS, lr=LR)
        paths = [folder / "versions" / str(version) for version in range(len(versions))]
        with capped_ends(2, MBIT) as (writer, reader):
            whole, shares = list[float](), list[list[float]]()
            changed = list[float]()
            for _ in range(rounds):
                seconds, _ = _pulls(writer, reader, paths, anchor_interval=1)
                whole.append(fmean(seconds))
                seconds, received = _pulls(writer, reader, paths, anchor_interval=NEVER)
                changed.append(fmean(seconds))
                shares.append(received)
    report("example_weights", len(versions[0]) / 1e6, "MB")
    report("delta_bytes_vs_whole", Spread(shares[0]), "ratio", 0.1)
    report("whole_sync_100mbit", Spread(whole), "s")
    report("delta_sync_100mbit", Spread(changed), "s")
    report("delta_sync_speedup_100mbit", Spread([a / b for a, b in zip(whole, changed, strict=True)]), "ratio", 5.0)


def _pulls(writer: End, reader: End, paths: list[Path], *, anchor_interval: int) -> tuple[list[float], list[float]]:
    """For all versions after the first: seconds from the manifest until it is read, and bytes as a share of all."""
    for end in (writer, reader):
        end.open(anchor_interval=anchor_interval)
    found: list[tuple[float, float]] = []
    for version, path in enumerate(paths, 1):
        seconds, (figures,) = seconds_of(writer.publish(version, path), [reader])
        found.append((seconds, figures["received_share"]))
    return [seconds for seconds, _ in found[1:]], [share for _, share in found[1:]]
